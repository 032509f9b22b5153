"""fit on one process, and the parts of it that need no ranks."""

from __future__ import annotations

import itertools
import json
import random
import time
from dataclasses import replace

import fit_cases as cases
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import shardwise as sw
from shardwise.geometry import Box
from shardwise.graph import capture, capture_loss
from shardwise.training import trainer as trainer_module
from shardwise.training.data import Reader, Source
from shardwise.training.loss_kind import loss_kind
from shardwise.training.moved import moved
from shardwise.training.sources import source_of


def data(samples: int = 20) -> TensorDataset:
    return TensorDataset(*cases.images(samples))


def accuracy(output, target):
    return (output.argmax(1) == target).double().mean()


def test_fit_trains_the_users_own_model_like_a_loop_written_by_hand():
    fitted, own = cases.classifier(), cases.classifier()
    history = sw.fit(
        fitted,
        data(),
        loss=F.cross_entropy,
        optimizer=cases.sgd,
        batch_size=8,
        epochs=2,
        shuffle=False,
        progress=False,
    )
    optimizer = cases.sgd(own.named_parameters())
    losses = []
    for _ in range(2):
        for x, y in DataLoader(data(), batch_size=8):
            optimizer.zero_grad()
            loss = F.cross_entropy(own(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item() * len(x))
    assert history["loss"] == pytest.approx([sum(losses[:3]) / 20, sum(losses[3:]) / 20], abs=1e-12)
    assert cases.error(fitted.state_dict(), own.state_dict()) == 0.0
    assert fitted.training


def test_a_model_that_lives_elsewhere_than_the_device_is_trained_there_and_written_back(monkeypatch):
    # This processor by its number is another device than without, as a first GPU is beside a CPU.
    device = torch.device("cpu", 0)
    monkeypatch.setattr(trainer_module, "join", lambda: replace(sw.init(), device=device))
    trainers = []

    class Keep(sw.Callback):
        def on_begin(self, trainer):
            trainers.append(trainer)

    fitted, own = cases.classifier(), cases.classifier()
    settings = {"loss": F.cross_entropy, "optimizer": cases.sgd, "batch_size": 8, "shuffle": False}
    sw.fit(fitted, data(), validation=data(6), callbacks=[Keep()], progress=False, **settings)
    optimizer = cases.sgd(own.named_parameters())
    for x, y in DataLoader(data(), batch_size=8):
        optimizer.zero_grad()
        F.cross_entropy(own(x), y).backward()
        optimizer.step()
    assert not trainers[0].is_plain
    assert trainers[0].store.tensors["0.weight"] is not fitted[0].weight
    assert cases.error(fitted.state_dict(), own.state_dict()) < 1e-10


def test_tensors_of_a_mini_batch_are_brought_to_the_device():
    x, y = moved(({"a": torch.zeros(2), "kind": "b"}, [torch.ones(2)]), torch.device("meta"))
    assert x["a"].is_meta
    assert x["kind"] == "b"
    assert y[0].is_meta


def test_fit_is_as_fast_as_a_loop_written_by_hand():
    torch.manual_seed(0)
    x, y = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    model = sw.zoo.build("resnet8", num_classes=10)
    trainer = sw.Trainer(model, (x, y), loss=F.cross_entropy, optimizer=cases.sgd)
    other = sw.zoo.build("resnet8", num_classes=10)
    optimizer = cases.sgd(other.named_parameters())

    def by_hand() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(other(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    steps = [("fit", lambda: trainer.step(x, y)), ("hand", by_hand)]
    times: dict[str, list[float]] = {"fit": [], "hand": []}
    for turn in range(20):
        for name, step in steps if turn % 2 else reversed(steps):
            # The time of this process alone: on a busy machine the clock on the wall measures the others.
            start = time.process_time()
            step()
            times[name].append(time.process_time() - start)
    assert trainer.is_plain
    assert min(times["fit"]) < 1.15 * min(times["hand"])


def test_validation_metrics_scheduler_and_early_stopping():
    rates = []

    class Rates(sw.Callback):
        def on_epoch(self, trainer, epoch, numbers):
            rates.append(trainer.optimizer.param_groups[0]["lr"])

    history = sw.fit(
        cases.classifier(),
        DataLoader(data(), batch_size=8, shuffle=True),
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.0),
        epochs=9,
        validation=data(6),
        batch_size=4,
        metrics=[accuracy],
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5),
        callbacks=[sw.EarlyStopping("val_accuracy", patience=1, mode="max"), Rates()],
        progress=False,
    )
    assert len(history) == 3
    assert "val_accuracy" in history.stopped
    assert set(history.epochs[0]) == {"loss", "seconds", "val_loss", "val_accuracy"}
    assert len(rates) == 3


def test_history_is_written_and_printed(tmp_path):
    history = sw.History("data=2", 2, [{"loss": 1.5, "seconds": 2.0}])
    history.save(tmp_path / "history.json")
    assert json.loads((tmp_path / "history.json").read_text())["epochs"] == [{"loss": 1.5, "seconds": 2.0}]
    assert "data=2 on 2 ranks" in str(history)


def test_sizes_that_change_need_to_be_announced():
    class Growing(TensorDataset):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return (x, y) if index < 4 else (x[:, :8, :8], y)

    settings = {
        "loss": F.cross_entropy,
        "optimizer": cases.sgd,
        "batch_size": 4,
        "shuffle": False,
        "progress": False,
    }
    with pytest.raises(ValueError, match="varying_sizes"):
        sw.fit(cases.classifier(), Growing(*cases.images(8)), **settings)
    history = sw.fit(cases.classifier(), Growing(*cases.images(8)), varying_sizes=True, **settings)
    assert len(history) == 1


def test_of_mini_batches_of_any_size_a_rank_loads_what_it_needs_and_one_sample():
    read = []

    class Pairs(TensorDataset):
        def __getitem__(self, index):
            read.append(index)
            x, y = super().__getitem__(index)
            return (x, y) if index < 4 else (x[:, :8, :8], y)

    def rows(batch):
        return batch.feed("x", Box.of([(2, 4), *((0, n) for n in batch.shapes[0][1:])])).shape

    x, y = cases.images(8)
    graph = capture(nn.Conv2d(3, 2, 1).double(), {"input": x[:4]}, check=False)
    graph = replace(graph, layers=tuple(replace(la, name="x") for la in graph.inputs))
    second = Reader(graph, lambda x, y: [x], lambda shapes: [2, 3], (tuple(x[:4].shape),))
    source = Source(Pairs(x, y), 4, varying_sizes=True)
    found = [(batch.samples, batch.shapes[0][2:], rows(batch)[0]) for batch in source.batches(second)]
    assert found == [(4, tuple(x.shape[2:]), 2), (4, (8, 8), 2)]
    assert read == [0, 2, 3, 4, 6, 7]
    idle = replace(second, positions=lambda shapes: [])
    read.clear()
    assert [batch.shapes[0][2:] for batch in source.batches(idle)] == [tuple(x.shape[2:]), (8, 8)]
    assert read == [0, 4]


def reader(x, wanted=None, told=None) -> Reader:
    """Return a reader of the images alone, of all samples unless some are wanted."""
    graph = capture(nn.Conv2d(3, 2, 1).double(), {"input": x[:4]}, check=False)
    graph = replace(graph, layers=tuple(replace(la, name="x") for la in graph.inputs))
    positions = wanted or (lambda shapes: list(range(shapes[0][0])))
    return Reader(graph, lambda x, y: [x], positions, (tuple(x[:4].shape),), told)


def test_a_distributed_sampler_is_refused():
    loader = DataLoader(data(), 4, sampler=DistributedSampler(data(), num_replicas=2, rank=0))
    with pytest.raises(ValueError, match=r"DistributedSampler.*without it"):
        sw.fit(cases.classifier(), loader, loss=F.cross_entropy, optimizer=cases.sgd, progress=False)


def test_samplers_are_followed_as_they_are():
    read = []

    class Watched(TensorDataset):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    samples = Watched(*cases.images(20))
    weighted = WeightedRandomSampler([0.0] * 18 + [1.0] * 2, 30)
    given = {
        "replacement": (DataLoader(samples, 8, sampler=RandomSampler(samples, True, 50)), 50, [8] * 6 + [2]),
        "some": (DataLoader(samples, 8, sampler=RandomSampler(samples, num_samples=12)), 12, [8, 4]),
        "weighted": (DataLoader(samples, 8, sampler=weighted, drop_last=True), 24, [8] * 3),
        "lists": (DataLoader(samples, batch_sampler=[[3, 4], [9], [5, 6, 7]]), 6, [2, 1, 3]),
    }
    for name, (loader, count, sizes) in given.items():
        source = source_of(loader, None)
        assert source.steps == len(sizes)
        source.first()
        orders = []
        for epoch in range(2):
            read.clear()
            found = [batch.samples for batch in source.batches(reader(samples.tensors[0]), epoch)]
            assert found == sizes, name
            assert len(read) == count, name
            orders.append(list(read))
        assert (orders[0] == orders[1]) == (name == "lists"), name
    assert orders[0] == [3, 4, 9, 5, 6, 7]
    shuffled = source_of(DataLoader(samples, 8, shuffle=True), None)
    assert shuffled.shuffle
    assert shuffled.followed is None


@pytest.mark.parametrize("loading", [0, 1])
def test_random_transforms_follow_from_the_seed_the_epoch_and_the_sample(loading):
    class Noisy(TensorDataset):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x + random.random() + torch.rand(()) + np.random.rand(), y

    samples = Noisy(*cases.images(8))

    def images(seed, epoch, of=None):
        for begin in (torch.manual_seed, random.seed, np.random.seed):
            begin(seed)
        given = reader(samples.tensors[0], of, lambda value: value)
        before = random.getstate()
        batches = list(Source(samples, 4, workers=loading).batches(given, epoch))
        assert random.getstate() == before
        box = Box.of([(2, 4), *((0, n) for n in batches[0].shapes[0][1:])])
        return torch.stack([batch.feed("x", box) for batch in batches])

    first = images(1, 0)
    assert torch.equal(first, images(2, 0))
    assert torch.equal(first, images(3, 0, lambda shapes: [2, 3]))
    assert not torch.equal(first, images(1, 1))


def test_a_rank_that_reads_everything_asks_what_it_needs_like_the_others():
    asked = []

    def wanted(shapes):
        asked.append(shapes[0][0])
        return [0]

    x, y = cases.images(10)
    batches = list(Source(TensorDataset(x, y), 4).batches(reader(x, wanted), everything=True))
    assert asked == [4, 4, 2]
    assert all(len(batch.inputs) == batch.samples for batch in batches)


class Endless(IterableDataset):
    """Twelve samples more each time it is asked, and no length."""

    def __init__(self) -> None:
        self.stream = iter(zip(*cases.images(48), strict=True))

    def __iter__(self):
        return itertools.islice(self.stream, 12)


def test_iterables_without_a_length_are_trained_on_from_their_first_mini_batch():
    seen = []

    class Counts(sw.Callback):
        def on_step(self, trainer, step, loss):
            seen.append((step, loss))

    settings = {"loss": F.cross_entropy, "optimizer": cases.sgd, "callbacks": [Counts()]}
    x, y = cases.images(48)
    whole = [(x[i : i + 4], y[i : i + 4]) for i in range(0, 24, 4)]
    sw.fit(cases.classifier(), iter(whole), **settings)
    wanted, seen = [loss for _, loss in seen], []
    assert len(wanted) == 6
    for given in ({"data": DataLoader(Endless(), 4)}, {"data": Endless(), "batch_size": 4}):
        sw.fit(cases.classifier(), epochs=2, **given, **settings)
        assert [step for step, _ in seen] == [0, 1, 2, 0, 1, 2]
        assert [loss for _, loss in seen] == pytest.approx(wanted, rel=1e-12)
        seen.clear()
    with pytest.raises(ValueError, match=r"data: .*once, and epochs=2"):
        sw.fit(cases.classifier(), (pair for pair in whole), epochs=2, **settings)
    with pytest.raises(ValueError, match=r"validation: .*once, and epochs=2"):
        sw.fit(cases.classifier(), whole, validation=iter(whole), epochs=2, **settings)


def test_what_fit_cannot_use_is_said():
    settings = {"loss": F.cross_entropy, "optimizer": cases.sgd, "progress": False}
    with pytest.raises(ValueError, match="batch_size"):
        sw.fit(cases.classifier(), data(), **settings)
    with pytest.raises(ValueError, match="validation"):
        sw.fit(cases.classifier(), data(), batch_size=4, metrics=[accuracy], **settings)
    with pytest.raises(ValueError, match="monitor"):
        sw.fit(cases.classifier(), data(), batch_size=4, callbacks=[sw.EarlyStopping()], **settings)
    with pytest.raises(sw.PlanError, match="2 ranks"):
        sw.fit(cases.classifier(), data(), batch_size=4, plan="data=2", **settings)


def mean_of_squares(output, target):
    return ((output - target) ** 2).mean()


def sum_of_squares(output, target):
    return ((output - target) ** 2).sum()


def sum_by_samples(output, target):
    return ((output - target) ** 2).sum() / output.shape[0]


def dice_per_sample(output, target):
    top = 2 * (output * target).sum((1, 2))
    return (1 - top / (output.sum((1, 2)) + target.sum((1, 2)) + 1)).mean()


def masked(output, target):
    return ((output - target) ** 2 * (target > 0)).sum() / (target > 0).sum()


def scaled_and_shifted(output, target):
    return 3 * F.l1_loss(output, target) + 0.1 - F.mse_loss(output, target) / 2


def root(output, target):
    return F.mse_loss(output, target).sqrt()


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (F.mse_loss, "mean"),
        (nn.L1Loss(reduction="sum"), "mean"),
        (mean_of_squares, "mean"),
        (sum_of_squares, "sum"),
        (sum_by_samples, "mean"),
        (dice_per_sample, "mean"),
        (scaled_and_shifted, "mean"),
        (masked, "other"),
        (root, "other"),
    ],
)
def test_how_losses_of_shares_add_up_is_found(loss, kind):
    generator = torch.Generator().manual_seed(0)
    output, target = (torch.rand(6, 4, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    assert loss_kind(capture_loss(loss, output, target)).kind == kind
    parts = [slice(0, 1), slice(1, 3), slice(3, 6)]
    means = sum(float(loss(output[p], target[p])) * (p.stop - p.start) / 6 for p in parts)
    sums = sum(float(loss(output[p], target[p])) for p in parts)
    corrected = isinstance(loss, nn.L1Loss)
    if kind == "mean" and not corrected:
        assert means == pytest.approx(float(loss(output, target)), rel=1e-12)
    if kind == "sum" or corrected:
        assert sums == pytest.approx(float(loss(output, target)), rel=1e-12)
