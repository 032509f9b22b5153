"""fit on one process, and the parts of it that need no ranks."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import fit_cases as cases
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardwise as sw
from shardwise.geometry import Box
from shardwise.graph import capture, capture_loss
from shardwise.training.data import Reader, Source
from shardwise.training.loss_kind import loss_kind


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
