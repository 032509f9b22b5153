"""What the ranks of the trainer's tests do besides comparing with one device."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import shardwise as sw
from shardwise.fit import _resolve
from shardwise.plan import micro_batches_of, samples_of
from shardwise.runtime import reducer
from shardwise.runtime.materialise import materialise
from shardwise.runtime.store import Store
from shardwise.training import stage_cuts
from shardwise.training import trainer as trainer_module

# A rank loads this file by its path, so its neighbours are not on the way of imports yet.
sys.path.append(str(Path(__file__).parent))
import fit_cases as cases


def sgd_of(rate: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda named: torch.optim.SGD([p for _, p in named], lr=rate, momentum=0.9)


def clipped(plan: str) -> tuple[float, float, float]:
    """Return the deviation of weights, of the norm, and the norm itself after clipped steps."""
    split, whole = cases.classifier(), cases.classifier()
    trainer = sw.Trainer(
        split, cases.images(4), plan, loss=F.cross_entropy, optimizer=cases.sgd, clip_norm=0.05
    )
    optimizer = cases.sgd(whole.named_parameters())
    worst = 0.0
    for seed in range(2):
        x, y = cases.images(4, seed=seed)
        trainer.step(x, y)
        optimizer.zero_grad()
        cases.unsplit_step(whole, F.cross_entropy, x, y, trainer.plan)
        norm = float(torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.05))
        worst = cases.worst(worst, abs(norm - trainer.gradient_norm) / norm)
        optimizer.step()
    return cases.error(trainer.state_dict(), whole.state_dict()), worst, norm


def accumulated(plan: str) -> tuple[float, float]:
    """Return how far weights are after one step, and after the two that make an update."""
    split, whole = cases.classifier(norm=False), cases.classifier(norm=False)
    trainer = sw.Trainer(
        split, cases.images(4), plan, loss=F.cross_entropy, optimizer=cases.sgd, accumulate=2
    )
    optimizer = cases.sgd(whole.named_parameters())
    before = {name: p.detach().clone() for name, p in whole.named_parameters()}
    trainer.step(*cases.images(4, seed=0))
    unchanged = cases.error(trainer.state_dict(), before)
    trainer.step(*cases.images(4, seed=1))
    for seed in range(2):
        x, y = cases.images(4, seed=seed)
        (F.cross_entropy(whole(x), y) / 2).backward()
    optimizer.step()
    return unchanged, cases.error(trainer.state_dict(), whole.state_dict())


def accumulated_over_epochs(plan: str) -> tuple[float, int]:
    """Fit with five mini-batches of which two make an update; return the deviation and the updates."""
    model, whole = cases.classifier(norm=False), cases.classifier(norm=False)
    x, y = cases.images(18)
    updates = []

    def counting(named: Any) -> torch.optim.Optimizer:
        optimizer = cases.sgd(named)
        optimizer.register_step_post_hook(lambda *_: updates.append(1))
        return optimizer

    sw.fit(
        model,
        TensorDataset(x, y),
        loss=F.cross_entropy,
        optimizer=counting,
        batch_size=4,
        epochs=2,
        shuffle=False,
        accumulate=2,
        plan=plan,
        progress=False,
    )
    optimizer = cases.sgd(whole.named_parameters())
    for _ in range(2):
        for parts in ((0, 4), (8, 12), (16,)):
            optimizer.zero_grad()
            for start in parts:
                part = slice(start, start + 4)
                (F.cross_entropy(whole(x[part]), y[part]) / len(parts)).backward()
            optimizer.step()
    return cases.error(model.state_dict(), whole.state_dict()), len(updates)


def overlapped(plan: str) -> tuple[int, int]:
    """Return how many reductions started before the last backward pass ended, and how many there were."""
    x, y = cases.images(8, 24)
    trainer = sw.Trainer(
        cases.classifier(),
        (x, y),
        plan,
        loss=F.cross_entropy,
        optimizer=cases.sgd,
        record=True,
        bucket_bytes=1,
    )
    trainer.step(x, y)
    trainer.events.clear()
    trainer.step(x, y)
    ends = [event.end for event in trainer.events if event.kind == "backward"]
    starts = [event.start for event in trainer.events if event.kind == "reduce"]
    return sum(start < max(ends) for start in starts), len(starts)


def summed_at_other_times() -> tuple[list[list[int]], float]:
    """Sum gradients in small pieces that rank 1 starts later than rank 0, between sums of batch norms.

    Returns for each rank how many sums of batch norms it had started when it started each piece, and how far
    the gradients are from those of one device.
    """
    x, y = cases.images(8)
    # A layer's gradient is many pieces: the last of them start when earlier layers' norms are on their way.
    with mock.patch.object(reducer, "SINGLE_BYTES", 64), mock.patch.object(reducer, "PIECE_BYTES", 256):
        trainer = sw.Trainer(cases.classifier(), (x, y), "data=2", loss=F.cross_entropy, bucket_bytes=64)
        trainer.bench.reducer.early = True
        wires = [line.wire for line in trainer.bench.reducer.lines.values()]
        norms, found = 0, []
        kind = type(wires[0])
        plain = kind.start_all_reduce

        def start(wire: Any, *args: Any, **settings: Any) -> Any:
            nonlocal norms
            if wire in wires:
                found.append(norms)
            else:
                norms += 1
            return plain(wire, *args, **settings)

        pump, late = reducer._Line.pump, trainer.fabric.rank == 1

        def seldom(line: Any, everything: bool = False) -> None:
            # What a rank does that notices only at the end that its sums are complete.
            if everything or not late or not line.flying or line.next == len(line.buckets):
                pump(line, everything)

        with (
            mock.patch.object(kind, "start_all_reduce", start),
            mock.patch.object(reducer._Line, "pump", seldom),
        ):
            trainer.step(x, y)
    whole = cases.classifier()
    cases.unsplit_step(whole, F.cross_entropy, x, y, trainer.plan)
    wanted = {name: p.grad for name, p in whole.named_parameters()}
    started: list[list[int]] = [[], []]
    dist.all_gather_object(started, found)
    return started, cases.error(trainer.gradients(), wanted)


def predicted(plan: str, batches: tuple[int, ...]) -> float:
    """Return how far predictions are from those of one device, after a step that moved the statistics."""
    split, whole = cases.classifier(), cases.classifier()
    trainer = sw.Trainer(split, cases.images(4), plan, loss=F.cross_entropy, optimizer=cases.sgd)
    optimizer = cases.sgd(whole.named_parameters())
    x, y = cases.images(4)
    trainer.step(x, y)
    cases.unsplit_step(whole, F.cross_entropy, x, y, trainer.plan)
    optimizer.step()
    whole.eval()
    worst = 0.0
    for batch in batches:
        x, _ = cases.images(batch, seed=batch)
        wanted = whole(x).detach()
        worst = cases.worst(worst, float((trainer.predict(x) - wanted).abs().max() / wanted.abs().max()))
    data = [cases.images(b, seed=b) for b in batches]
    found = trainer.evaluate(data, {"accuracy": lambda o, t: (o.argmax(1) == t).double().mean()})
    total = sum(b for b in batches)
    wanted_loss = sum(float(F.cross_entropy(whole(x), y)) * len(x) for x, y in data) / total
    right = sum(int((whole(x).argmax(1) == y).sum()) for x, y in data) / total
    return cases.worst(worst, abs(found["loss"] - wanted_loss), abs(found["accuracy"] - right))


def adam(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for _, p in named], lr=0.01)


def saved(plan: str, folder: str, optimizer: str = "sgd", steps: int = 1) -> float:
    """Save after some steps, load into a fresh trainer, and compare two further steps."""
    settings: dict[str, Any] = {
        "loss": F.cross_entropy,
        "optimizer": adam if optimizer == "adam" else cases.sgd,
    }
    first = sw.Trainer(cases.classifier(), cases.images(4), plan, **settings)
    for _ in range(steps):
        first.step(*cases.images(4, seed=0))
    first.save(folder)
    other = cases.classifier()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    second = sw.Trainer(other, cases.images(4), plan, **settings)
    second.load(folder)
    for seed in (1, 2):
        first.step(*cases.images(4, seed=seed))
        second.step(*cases.images(4, seed=seed))
    return cases.error(second.state_dict(), first.state_dict())


def loaded_with_another_optimizer(folder: str) -> str:
    example, settings = cases.images(4), {"loss": F.cross_entropy}
    trainer = sw.Trainer(cases.classifier(), example, "stages=2", optimizer=adam, **settings)
    trainer.step(*example)
    trainer.save(folder)
    other = sw.Trainer(cases.classifier(), example, "stages=2", optimizer=cases.sgd, **settings)
    try:
        other.load(folder)
    except ValueError as refusal:
        return str(refusal)
    return ""


def loaded_under_another_plan(folder: str) -> str:
    trainer = sw.Trainer(
        cases.classifier(), cases.images(4), "data=2", loss=F.cross_entropy, optimizer=cases.sgd
    )
    trainer.save(folder)
    other = sw.Trainer(cases.classifier(), cases.images(4), "spatial=2x1", loss=F.cross_entropy)
    try:
        other.load(folder)
    except sw.PlanError as refusal:
        return str(refusal)
    return ""


def local_steps(plan: str) -> tuple[float, int, int]:
    """Feed only what this rank needs; return the deviation, the values given, and those of the mini-batch."""
    x, y = cases.masks(4)
    loss = cases.counted_loss
    one = sw.Trainer(cases.segmenter(), (x, y), plan, loss=loss, optimizer=cases.sgd)
    two = sw.Trainer(cases.segmenter(), (x, y), plan, loss=loss, optimizer=cases.sgd)
    wanted = one.step(x, y)
    needs = two.needs((x.shape, y.shape))
    parts = [(x, y)[need.input][need.box.slices()].clone() for need in needs]
    found = two.step_local((x.shape, y.shape), parts)
    error = cases.worst(abs(found - wanted), cases.error(two.state_dict(), one.state_dict()))
    return error, sum(p.numel() for p in parts), x.numel() + y.numel()


def big_model() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(11):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)).double()


def materialised(plan: str) -> tuple[float, float, dict[str, Tensor], float]:
    """Return this rank's peak share of the parameters, the loss, the first weights, and a later loss."""
    x, y = cases.images(4)
    trainer = sw.Trainer(big_model, (x, y), plan, loss=F.cross_entropy, optimizer=cases.sgd, seed=3)
    whole = sum(p.numel() for p in trainer.model.parameters()) * 8
    streamed = {name: t.clone() for name, t in trainer.stream_state() if t is not None}
    first = trainer.step(x, y)
    if any(p.device.type != "meta" for p in trainer.model.parameters()):
        raise AssertionError("the user's model must stay on meta")
    return trainer.peak_parameter_bytes / whole, first, streamed, trainer.step(x, y)


def materialised_alone() -> dict[str, Tensor]:
    """Return the first weights of the whole model on one rank."""
    with torch.device("meta"):
        model = big_model()
    store = Store(torch.device("cpu"))
    boxes = {name: sw.Box.whole(p.shape) for name, p in model.named_parameters()}
    materialise(store, model, boxes, seed=3)
    return {name: t.detach() for name, t in store.tensors.items()}


def cut_within(limit: float | None, share: float) -> tuple[tuple[int, ...] | str, tuple[str, ...]]:
    """Return the cuts of a network whose first layers have most of the values, or why there are none."""
    torch.manual_seed(0)
    wide = [nn.Conv2d(3, 32, 1), nn.Conv2d(32, 32, 1), nn.Conv2d(32, 2, 1, stride=8)]
    deep = [nn.Conv2d(2, 64, 1), nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5)]
    model = nn.Sequential(*wide, *deep, *head).double()
    plan = "stages=2 schedule=gpipe micro_batches=2"
    session = sw.init()
    node = share * session.place.local_size * (1 + session.rank)
    try:
        with mock.patch.object(stage_cuts, "memory_bytes", return_value=node):
            trainer = sw.Trainer(model, cases.images(4, 32), plan, loss=F.cross_entropy, memory_limit=limit)
    except sw.PlanError as refusal:
        return str(refusal), ()
    trainer.step(*cases.images(4, 32))
    return trainer.cuts or (), tuple(note for note in trainer.notes if note.startswith("memory"))


def fitted_within(limit: float) -> str:
    """Fit two stages in so many bytes a rank; return why it was refused, or an empty text."""
    model, data = cases.classifier(), TensorDataset(*cases.images(4))
    try:
        sw.fit(
            model,
            data,
            loss=F.cross_entropy,
            optimizer=cases.sgd,
            batch_size=4,
            plan="stages=2",
            progress=False,
            memory_limit=limit,
        )
    except sw.PlanError as refusal:
        return str(refusal)
    return ""


def refused(plan: str, loss_mean: str) -> str:
    """Train with a loss over the whole mini-batch; return why it was refused, or an empty text."""
    try:
        trainer = sw.Trainer(
            cases.segmenter(), cases.masks(4), plan, loss=cases.batch_dice, loss_mean=loss_mean
        )
    except sw.PlanError as refusal:
        return str(refusal)
    trainer.step(*cases.masks(4))
    return ""


def deferred(plan: str) -> tuple[float, int]:
    """Compare running statistics with those of the whole mini-batch; return deviation and the counter."""
    x, y = cases.images(8)
    split = cases.first_norm()
    trainer = sw.Trainer(split, (x, y), plan, loss=F.cross_entropy)
    trainer.step(x, y)
    whole = cases.first_norm()
    whole(x)
    found = trainer.state_dict()
    names = ("1.running_mean", "1.running_var")
    wanted = {name: whole.state_dict()[name] for name in names}
    return cases.error({n: found[n] for n in names}, wanted), int(found["1.num_batches_tracked"])


class Counting(TensorDataset):
    """Count which samples are read."""

    read: set[int]

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        self.read.add(index)
        return super().__getitem__(index)


def fitted(plan: str) -> tuple[int, list[float], float]:
    """Fit on 20 samples; return how many this rank read, the losses, and how far the user's model is."""
    data = Counting(*cases.images(20))
    data.read = set()
    model, whole = cases.classifier(), cases.classifier()
    settings: dict[str, Any] = {"batch_size": 6, "epochs": 2, "shuffle": False, "progress": False}
    history = sw.fit(model, data, loss=F.cross_entropy, optimizer=cases.sgd, plan=plan, **settings)
    read = set(data.read)
    optimizer = cases.sgd(whole.named_parameters())
    for _ in range(2):
        for start in range(0, 20, 6):
            x, y = (tensor[start : start + 6] for tensor in data.tensors)
            optimizer.zero_grad()
            cases.unsplit_step(whole, F.cross_entropy, x, y, sw.Plan.parse(plan))
            optimizer.step()
    # The example that the network is captured with is made of the first two samples, on every rank.
    return len(read - {0, 1}), history["loss"], cases.error(model.state_dict(), whole.state_dict())


class Drawing(TensorDataset):
    """Add noise of three generators to a sample, and draw its label."""

    drawn: list[tuple[float, ...]]

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, _ = super().__getitem__(index)
        draws = (float(torch.rand(())), random.random(), float(np.random.rand()))
        self.drawn.append((index, *draws))
        return x + sum(draws), torch.tensor(int(5 * draws[0]))


class Wilful(Sampler[int]):
    """Draw with replacement from a generator of its own."""

    def __iter__(self) -> Any:
        return iter(np.random.default_rng().integers(0, 20, 18).tolist())

    def __len__(self) -> int:
        return 18


def drawn(plan: str, own_order: bool) -> tuple[list[tuple[float, ...]], list[float], float]:
    """Fit on samples with random transforms, each rank's generators elsewhere.

    Returns what was drawn for each sample that was read, the losses, and how far the weights are from those
    of one device that is given the samples which this rank read.
    """
    seeds = 100 + sw.init().rank
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(seeds)
    data = Drawing(*cases.images(20))
    data.drawn = []
    model, whole = cases.classifier(norm=False), cases.classifier(norm=False)
    given = {"data": data, "batch_size": 6}
    if own_order:
        given = {"data": DataLoader(data, batch_size=6, sampler=Wilful())}
    history = sw.fit(
        model, loss=F.cross_entropy, optimizer=cases.sgd, plan=plan, epochs=2, progress=False, **given
    )
    read = [row for row in data.drawn[2:] if row[0] >= 0]
    optimizer = cases.sgd(whole.named_parameters())
    images, _ = data.tensors
    epoch = len(read) // 2
    for start in (i for e in (0, epoch) for i in range(e, e + epoch, 6)):
        rows = read[start : min(start + 6, epoch if start < epoch else 2 * epoch)]
        x = torch.stack([images[int(i)] + sum(draws) for i, *draws in rows])
        optimizer.zero_grad()
        F.cross_entropy(whole(x), torch.tensor([int(5 * row[1]) for row in rows])).backward()
        optimizer.step()
    return read, history["loss"], cases.error(model.state_dict(), whole.state_dict())


class OneRankStops(sw.Callback):
    """Have a reason to stop on one rank alone, as a look at a clock may give."""

    def __init__(self, rank: int) -> None:
        self.rank, self.seconds = rank, []

    def on_epoch(self, trainer: Any, epoch: int, numbers: dict[str, float]) -> str | None:
        self.seconds.append(numbers["seconds"])
        return "slow" if trainer.fabric.rank == self.rank and epoch == 1 else None


def stopped_by(rank: int) -> tuple[str, list[float]]:
    """Fit with a reason to stop on one rank; return the reason of all and the times that the callback saw."""
    callback = OneRankStops(rank)
    history = sw.fit(
        cases.classifier(),
        TensorDataset(*cases.images(8)),
        loss=F.cross_entropy,
        optimizer=cases.sgd,
        batch_size=4,
        epochs=3,
        plan="data=2",
        callbacks=[callback],
        progress=False,
    )
    return history.stopped, callback.seconds


def streamed(plan: str) -> tuple[list[float], float]:
    """Fit on a generator; return the losses and how far the model is from one device."""
    model, whole = cases.classifier(norm=False), cases.classifier(norm=False)
    batches = [cases.images(n, seed=n) for n in (4, 6, 2)]
    history = sw.fit(
        model,
        (batch for batch in batches),
        loss=F.cross_entropy,
        optimizer=cases.sgd,
        plan=plan,
        validation=iter(batches),
        progress=False,
    )
    optimizer = cases.sgd(whole.named_parameters())
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(whole(x), y).backward()
        optimizer.step()
    return history["loss"], cases.error(model.state_dict(), whole.state_dict())


def checked(plan: str) -> tuple[bool, str]:
    report = sw.check(cases.classifier(), cases.images(4), plan, F.cross_entropy, show=False)
    return report.ok, report.worst.layer


def uncaptured() -> dict[str, Any]:
    """Return what is said of plans for a model that cannot be captured, and how replicas agree."""
    example = cases.paired(4)
    found: dict[str, Any] = {}
    for plan in ("spatial=2x1", "stages=2", "data=2", "data=2 batch_norm=local"):
        try:
            trainer = sw.Trainer(
                cases.undecided(True), example, plan, loss=cases.two_losses, optimizer=cases.sgd
            )
        except sw.PlanError as refusal:
            found[plan] = str(refusal)
        else:
            found[plan], found["note"] = "", " ".join(trainer.notes)
    trainer.step(*example)
    mine = torch.cat([b.double().reshape(-1) for b in trainer.model.buffers()])
    first = mine.clone() if trainer.fabric.rank == 0 else torch.zeros_like(mine)
    trainer.fabric.world.all_reduce(first)
    found["statistics"] = float((mine - first).abs().max())
    whole = cases.undecided(True).eval()
    whole.load_state_dict(trainer.state_dict())
    (x, kind), _ = cases.paired(5, seed=2)
    wanted, outputs = whole(x, kind)["classes"], trainer.predict((x, kind))
    found["predicted"] = float((outputs["classes"] - wanted).abs().max())
    settings = {"loss": cases.two_losses, "optimizer": cases.sgd, "loss_mean": "exact", "cut": True}
    found["auto"] = str(_resolve("auto", cases.undecided(True), example, 4, **settings).plan)
    return found


def packed_on_nodes(plan: str, per_node: int) -> tuple[tuple[int, ...], float, float]:
    """Train a step as if nodes had so few ranks; return where this rank is, and how far from one device."""
    x, y = cases.images(4)
    model, whole = cases.classifier(), cases.classifier()
    with mock.patch.object(trainer_module, "ranks_per_node", return_value=per_node):
        trainer = sw.Trainer(model, (x, y), plan, loss=F.cross_entropy, optimizer=cases.sgd)
    loss = trainer.step(x, y)
    wanted = F.cross_entropy(whole(x), y)
    wanted.backward()
    grads = {name: p.grad for name, p in whole.named_parameters()}
    place = trainer.fabric.mesh.place(trainer.session.rank)
    return place, abs(loss / float(wanted) - 1), cases.error(trainer.gradients(), grads)


def local_norm(plan: str) -> tuple[float, float]:
    """Compare `batch_norm=local` with replicas that know nothing of each other; deviations of two steps.

    The reference passes every share of a replica through a model of its own, and keeps the first replica's
    running statistics.
    """
    trainer = sw.Trainer(cases.classifier(), cases.images(8), plan, loss=F.cross_entropy, optimizer=cases.sgd)
    whole = cases.classifier()
    optimizer = cases.sgd(whole.named_parameters())
    gradients = 0.0
    for seed in range(2):
        x, y = cases.images(8, seed=seed)
        trainer.step(x, y)
        optimizer.zero_grad()
        copies = [whole] + [copy.deepcopy(whole) for _ in range(trainer.plan.data - 1)]
        for replica, model in enumerate(copies):
            for m in range(micro_batches_of(trainer.plan)):
                lo, hi = samples_of(trainer.plan, 8, replica, m)
                (F.cross_entropy(model(x[lo:hi]), y[lo:hi]) * ((hi - lo) / 8)).backward()
        for name, parameter in whole.named_parameters():
            parameter.grad = sum(dict(model.named_parameters())[name].grad for model in copies)
        wanted = {name: p.grad for name, p in whole.named_parameters()}
        gradients = cases.worst(gradients, cases.error(trainer.gradients(), wanted))
        optimizer.step()
    return gradients, cases.error(trainer.state_dict(), whole.state_dict())


def local_norm_of_tiles() -> tuple[float, float]:
    """Compare `batch_norm=local` on two tiles with a norm of each half of the image."""
    x, y = cases.images(4, 12)
    trainer = sw.Trainer(cases.first_norm(), (x, y), "spatial=2x1 batch_norm=local", loss=F.cross_entropy)
    trainer.step(x, y)
    whole = cases.first_norm()
    conv, norm, *rest = whole
    other = copy.deepcopy(norm)
    other.weight, other.bias = norm.weight, norm.bias
    # The owner of an output row is the owner of the input row in the same place.
    upper, lower = conv(x).split((6, 4), 2)
    joined = torch.cat((norm(upper), other(lower)), 2)
    F.cross_entropy(nn.Sequential(*rest)(joined), y).backward()
    wanted = {name: p.grad for name, p in whole.named_parameters() if not name.startswith("0.bias")}
    return cases.error(trainer.gradients(), wanted), cases.error(trainer.state_dict(), whole.state_dict())


def lowerings(plan: str) -> list[int]:
    """Return how often stages are lowered for images of two sizes: to train, again, to predict, again."""
    from shardwise.program import lowered

    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)).double()
    sizes = [(torch.randn(2, 3, n, 9).double(), torch.zeros(2, 4, n, 9).double()) for n in (8, 12)]
    trainer = sw.Trainer(model, sizes[0], plan, loss=F.mse_loss)
    found = []
    with mock.patch.object(lowered, "lower_stage", wraps=lowered.lower_stage) as lower:
        for predicts in (False, False, True, True):
            for x, y in sizes:
                _ = trainer.predict(x) if predicts else trainer.step(x, y)
            found.append(lower.call_count - sum(found))
    return found
