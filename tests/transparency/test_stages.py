"""Stages, schedules and replicas, alone and with tiles, equal one device on the same micro-batches.

The default suite has the named plans; the product of stages, micro-batches and schedules is in the full.
"""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from shardwise.runtime import fabric
from shardwise.runtime.ordered import Channel, OrderedWire
from shardwise.runtime.wire import Parcel, Pending, TorchWire
from transparency.compare import FLOOR_FACTOR, LIMIT, Outcome, errors, scale_of
from transparency.harness import Case, Comparison, check, compared, split, unsplit
from transparency.models import ZOO

BATCH = 8
FULL = pytest.mark.full
NAMED = {
    "unet under 1f1b on four ranks": ("unet", "stages=4 schedule=1f1b micro_batches=4"),
    "skips under zero-bubble": ("unet", "stages=3 schedule=zero-bubble micro_batches=4"),
    "stages x tiles x data": ("resnet20", "data=2 stages=2 spatial=2x1 schedule=1f1b micro_batches=3"),
    "tiled first stage, both ways": ("resnet20", "stages=2x2|1|1 schedule=gems-mast"),
    "five dimensions": ("resnet20", "data=2 stages=2x1|1|1 schedule=bidirectional micro_batches=4"),
    "one micro-batch": ("resnet20", "data=2 stages=2 schedule=layer"),
}
# Left to the whole product: the default suite meets their like.
LONG = ("stages x tiles x data", "1f1b on four ranks", "both ways")
SCHEDULES = ("gpipe", "1f1b", "zero-bubble", "bidirectional", "gems-mast", "gems-master")
MODELS = ("resnet20", "unet", "vgg16")
DEEP = (
    "stages=2 schedule=1f1b micro_batches=2",
    "stages=4 schedule=gems-mast",
    "data=2 stages=2 micro_batches=2",
)


def case(model: str, plan: str, steps: int = 2) -> Case:
    _, sizes, loss = ZOO[model]
    # Batch norm over fewer than eight values cannot be compared; the smallest images have enough of them.
    return Case(model, (BATCH, *sizes[0][1:]), plan, loss, steps=steps)


def plans() -> list[str]:
    found = ["stages=2 schedule=layer", "stages=3 schedule=layer", "stages=4 schedule=layer", "data=2"]
    for stages, parts, schedule in itertools.product((2, 3, 4), (1, 3, 4), SCHEDULES):
        if schedule == "bidirectional" and parts == 1:
            continue  # two directions need a micro-batch each
        more = " replication=2" if schedule == "gems-master" else ""
        found.append(f"stages={stages} schedule={schedule} micro_batches={parts}{more}")
    return found + [f"stages=2x1|1 schedule={schedule} micro_batches=4" for schedule in SCHEDULES]


@pytest.mark.parametrize("name", [pytest.param(n, marks=FULL) if n in LONG else n for n in NAMED])
def test_named_plans_equal_one_device(name: str) -> None:
    check(case(*NAMED[name], steps=1))


ORDERED = {
    "1f1b": ("unet", "stages=2 schedule=1f1b micro_batches=4"),
    # Weights' parts put off keep gradients that the tiles' exchanges must not write to.
    "tiles under zero-bubble": ("resnet20", "stages=2x1|1 schedule=zero-bubble micro_batches=4"),
    "1f1b on four ranks": ("unet", "stages=4 schedule=1f1b micro_batches=4"),
    "both ways": ("unet", "stages=2 schedule=bidirectional micro_batches=4"),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=FULL) if n in LONG else n for n in ORDERED])
def test_a_transport_without_tags_gives_the_same(name: str) -> None:
    """Messages as over NCCL: a group for each way between two ranks, in which only the order counts."""
    ordered = case(*ORDERED[name], steps=1)
    found = run_ranks(in_order, ordered.ranks, "gloo", (ordered,), deadline=120.0)
    comparison = found[0][0]
    assert comparison is not None
    assert not comparison.bad
    assert all(tags == {0} for _, tags, _ in found)
    for rank, (_, _, ways) in enumerate(found):
        # Every group carries messages one way only.
        assert ways
        assert all(rank in (source, target) for source, target, _ in ways)


def in_order(ordered: Case) -> tuple[Comparison | None, set[int], set[Channel]]:
    """Compare under groups that keep the order of messages; return the tags and channels used as well."""
    tags: set[int] = set()
    plain = TorchWire.send

    def send(wire: TorchWire, parcel: Parcel, tag: int, what: str) -> Pending:
        tags.add(tag)
        return plain(wire, parcel, tag, what)

    with (
        mock.patch.object(fabric, "keeps_order", return_value=True),
        mock.patch.object(TorchWire, "send", send),
    ):
        comparison, _ = compared(ordered)
        return comparison, tags, set(OrderedWire(back=False).channels)


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("plan", plans())
def test_every_schedule_equals_one_device(model: str, plan: str) -> None:
    check(case(model, plan), deadline=250.0)


@pytest.mark.full
@pytest.mark.parametrize("plan", DEEP)
def test_a_thousand_layers_are_as_exact_as_one_device(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    deep = case("resnet1001v2", plan, steps=1)
    results = run_ranks(deviations, deep.ranks, "mpi4py", (deep,), deadline=550.0)
    worst, threads, noise = results[0]
    with capsys.disabled():
        print(f"\nresnet1001v2, {plan}: {worst:.1e}; one device from itself: {threads:.1e} with two threads")
        print(f"instead of one, {noise:.1e} with its samples in another order or other last bits")
    # Layers this small give the same bits with any number of threads: their own noise shows otherwise.
    assert worst <= max(LIMIT, FLOOR_FACTOR * max(threads, noise))


def deviations(deep: Case) -> tuple[float, float, float]:
    """Return, on rank 0, how far the plan is from one device, and that from itself, twice."""
    found = split(deep)
    if dist.get_rank():
        return 0.0, 0.0, 0.0
    expected = unsplit(deep)
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if threads == 1 else 1)
    other = unsplit(deep, "threads")
    torch.set_num_threads(threads)
    largest, wanted = scale_of(expected), expected.tensors()

    def deviation(run: Outcome) -> float:
        return max(errors(run.tensors(), wanted, largest).values())

    noise = max(deviation(unsplit(deep, variant)) for variant in ("reversed", "rounded"))
    return deviation(found), deviation(other), noise
