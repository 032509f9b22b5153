"""The bounds of the search hold, its recurrences are the event simulation, its shortcuts change nothing."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_cases import Fixed, machine
from torch import nn

from shardwise.graph import capture
from shardwise.machine import Link, Machine, Node, Tier
from shardwise.oracle import Event, Kind, Oracle, Roofline, simulate
from shardwise.oracle.search import classes, search
from shardwise.oracle.search.blocks import Block, blocks_of
from shardwise.oracle.search.coarse import Coarse
from shardwise.oracle.search.passes import Stages, ends_of
from shardwise.oracle.search.relay import order_of, run
from shardwise.oracle.search.room import Room
from shardwise.oracle.search.space import Timing, timings
from shardwise.oracle.search.tally import Tally
from shardwise.oracle.search.worlds import legal_rows
from shardwise.plan import Plan
from shardwise.plan.split import parse_split
from shardwise.program.actions import Act
from shardwise.program.assign import UNSHARED


class Block4(nn.Module):
    """A residual block."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x):
        return x + torch.relu(self.norm(self.conv(x)))


@pytest.fixture(scope="module")
def graph():
    """Five residual blocks, for eight samples of 4x12x12."""
    return capture(nn.Sequential(*(Block4() for _ in range(5))), torch.zeros(8, 4, 12, 12), check=False)


def test_no_coarse_simulation_beats_its_bounds(graph):
    rows = legal_rows(graph, 6, False, Tally())
    coarse = Coarse(graph, machine(), Fixed(), rows)
    checked = 0
    for index, found in enumerate(coarse.rows):
        bounds, least = coarse.seconds(index), coarse.least_bytes(index)
        for shape in np.unique(found.shape).tolist():
            places = np.flatnonzero(found.shape == shape)
            pipeline = coarse.pipeline(index, shape)
            some = found.only(places)
            cuts = coarse.at_cuts(index, some)
            closer = pipeline.closer(some.timing, some.samples)
            outcomes = [coarse.evaluate(index, row) for row in places.tolist()]
            seconds = np.array([o.seconds for o in outcomes]) * (1 + 1e-9)
            assert np.all(bounds[places] <= seconds)
            assert np.all(cuts <= seconds)
            assert np.all(closer <= seconds)
            assert np.all(least[places] <= np.array([o.peak_bytes for o in outcomes]) * (1 + 1e-9))
            checked += len(places)
    assert checked > 1000


@st.composite
def pipelines(draw):
    count = draw(st.integers(2, 6))
    numbers = st.lists(st.floats(0.01, 2), min_size=count, max_size=count).map(np.array)
    forward, value, weight, message = (draw(numbers) for _ in range(4))
    timing = draw(st.sampled_from([t for t in timings(2) if t.micro_batches <= 8]))
    return Stages(forward, value + weight, weight, message[1:]), timing


def events(stages: Stages, timing: Timing):
    """Write the passes of a schedule as events of ranks that send and receive."""
    last, lists = len(stages.forward) - 1, {}
    for rank, order in enumerate(order_of(len(stages.forward), timing)):
        mine = lists[rank] = []
        for act, stage, micro in order:
            step = {Act.FORWARD: -1, Act.BACKWARD: 1}.get(act)
            if step is not None and 0 <= stage + step <= last:
                mine.append(Event(Kind.RECEIVE, 0.0, "x", key=(act, stage + step, micro)))
            seconds = {
                Act.FORWARD: stages.forward[stage],
                Act.BACKWARD: stages.backward[stage],
                Act.BACKWARD_WEIGHT: stages.weight[stage],
            }[act]
            if timing.schedule == "zero-bubble" and act is Act.BACKWARD:
                seconds -= stages.weight[stage]
            mine.append(Event(Kind.WORK, float(seconds), "x"))
            if step is not None and 0 <= stage - step <= last:
                flight = stages.message[min(stage, stage - step)]
                mine.append(Event(Kind.SEND, 0.0, "x", key=(act, stage, micro), flight=float(flight)))
    return lists


@settings(max_examples=60, deadline=None)
@given(pipelines())
def test_recurrences_and_relays_are_the_event_simulation(case):
    stages, timing = case
    ends = np.zeros(len(stages.forward))
    for span in simulate(events(stages, timing)):
        ends[span.rank] = max(ends[span.rank], span.end)
    np.testing.assert_allclose(run(order_of(len(ends), timing), stages), ends)
    if timing.schedule != "bidirectional":
        np.testing.assert_allclose(ends_of(stages, timing), ends)


def test_repeated_blocks_are_found():
    assert blocks_of([7, 1, 2, 3, 1, 2, 3, 1, 2, 3, 9]) == [
        Block(0, 1, 0), Block(1, 4, 1), Block(4, 7, 1), Block(7, 10, 1), Block(10, 11, 2),
    ]  # fmt: skip
    assert [b.stop - b.start for b in blocks_of([1, 2, 3])] == [1, 1, 1]


@pytest.mark.parametrize("split", ["1", "2x2", "4x1", "filter:2", "channel:4", "pairs:2"])
@pytest.mark.parametrize("halo", ["layer", "fused"])
def test_blocks_only_save_time(graph, split, halo, monkeypatch):
    fast = classes.Sorter(graph)
    assert any(block.stop - block.start > 1 for block in fast.blocks)
    single = lambda codes: [Block(i, i + 1, i) for i in range(len(codes))]  # noqa: E731
    monkeypatch.setattr(classes, "blocks_of", single)
    slow = classes.Sorter(graph)
    one, other = (sorter.sort(parse_split(split, "split"), halo) for sorter in (fast, slow))

    def costs(sorted_):
        found = [sorted_.classes[i] for i in sorted_.of]
        return [(c.task.out, c.task.wants, c.moves, c.channels, c.saved, c.made, c.trained) for c in found]

    assert costs(one) == costs(other)


def coarsely(graph, where, plan):
    """Return what sums over layers say of a plan."""
    coarse = Coarse(graph, where, Roofline(where.device), legal_rows(graph, plan.ranks, False, Tally()))
    places = ((index, row) for index, rows in enumerate(coarse.rows) for row in range(len(rows)))
    return next(coarse.evaluate(*place) for place in places if coarse.candidate(*place).plan() == plan)


PLANS = ["data=1", "data=2", "spatial=2x1", "filter=2", "pairs=2", "stages=2 schedule=layer"]


@pytest.mark.parametrize("text", PLANS)
def test_coarse_and_exact_agree(graph, text):
    where, plan = Machine.load("lassen"), Plan.parse(text)
    exact = Oracle(graph, where).predict(plan).step_seconds
    assert coarsely(graph, where, plan).seconds == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("text", ["data=8", "data=4 spatial=2x1", "stages=8 micro_batches=8 schedule=gpipe"])
def test_ranks_that_take_turns_on_cores_need_as_long_as_events_say(graph, text):
    device = dataclasses.replace(machine().device, host=True)
    where = machine(device=device, node=Node(2, 2), nodes=1, tiers=(Tier("node", 0, Link(1e-9, 1e12)),))
    plan = Plan.parse(text)
    found = coarsely(graph, where, plan)
    assert found.seconds == pytest.approx(Oracle(graph, where).predict(plan).step_seconds, rel=0.15)
    assert "turns on cores" in found.breakdown


@pytest.mark.parametrize("text", ["data=4", "data=2 spatial=2x1", "stages=4 schedule=gpipe micro_batches=4"])
def test_reading_the_input_takes_as_long_as_events_say(graph, text):
    plan, lassen = Plan.parse(text), Machine.load("lassen")
    slow = dataclasses.replace(lassen, input_bytes_per_second=1e6)
    more = coarsely(graph, slow, plan).seconds - coarsely(graph, lassen, plan).seconds
    exact = [Oracle(graph, where).predict(plan).step_seconds for where in (slow, lassen)]
    # Borders that tiles read too are not counted.
    assert more == pytest.approx(exact[0] - exact[1], rel=0.15)
    assert coarsely(graph, slow, plan).words.startswith("Limited by input")


@pytest.mark.parametrize("batch", [2, 64], ids=["too few samples to share", "samples to share"])
def test_no_empty_tile_stands_for_its_group(batch):
    narrowing = nn.Sequential(*(nn.Conv2d(8, 8, 3, stride=2, padding=1) for _ in range(4)))
    graph, where = capture(narrowing, torch.zeros(batch, 8, 64, 64), check=False), Machine.load("lassen")
    tail = "auto" if batch >= 16 else UNSHARED
    found = classes.Sorter(graph).sort(parse_split("16x1", "split"), "layer", tail)
    assert not any(c.task.out.empty for c in found.classes)
    plan = Plan.parse("spatial=16x1")
    exact = Oracle(graph, where).predict(plan)
    assert coarsely(graph, where, plan).seconds == pytest.approx(exact.step_seconds, rel=0.15)


def test_whether_anything_fits_is_what_the_search_says(graph):
    asking = {"kernels": Fixed(), "objective": "memory", "keep": 1, "exact": False}
    for ranks, batch in ((2, 8), (4, 6)):
        least = search(graph, machine(), ranks, batch, **asking).best.peak_bytes
        # One sorts the layers for this mini-batch, the other for the graph's: some bytes do not grow with it.
        assert Room(graph, machine(), memory=1.001 * least).fits(ranks, batch)
        assert not Room(graph, machine(), memory=0.999 * least).fits(ranks, batch)
