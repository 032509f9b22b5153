"""What a prediction does once: for ranks that do the same, for layers that repeat, for other mini-batches."""

import pytest
import torch
from oracle_cases import Fixed, machine, small_graph, stage
from torch import nn

from shardwise.geometry import Box, Layout
from shardwise.geometry.access import needed, needed_by_all
from shardwise.graph import capture
from shardwise.oracle import price_stage
from shardwise.oracle.memory import footprint, footprints
from shardwise.plan import Split, Way
from shardwise.program import Compute, Regrid, lower_stage
from shardwise.program import needs as needs_module


class Counting(Fixed):
    """Count how often a kernel is asked for."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def seconds(self, task, direction):
        self.asked += 1
        return super().seconds(task, direction)


@pytest.mark.parametrize("text", ["filter=2", "filter=8", "spatial=1x8"])
def test_ranks_that_do_the_same_are_priced_once(text):
    program, kernels = stage(text), Counting()
    price_stage(program, machine(), kernels)
    work = [op for op in program.ops if not isinstance(op, Regrid)]
    # At most the two ends and those between them differ, however many ranks there are.
    kinds = sum(len(op.kinds) for op in work)
    assert kinds == (len(work) if text.startswith("filter") else kinds) <= 3 * len(work)
    assert kernels.asked <= 3 * kinds


def test_ranks_of_one_kind_have_the_same_shapes():
    program = stage("spatial=2x2")
    for op in program.ops:
        if isinstance(op, Compute):
            assert sorted(rank for ranks in op.kinds for rank in ranks) == [0, 1, 2, 3]
            for first, *others in op.kinds:
                for rank in others:
                    shapes = [[read.stored(r).shape for read in op.reads] for r in (first, rank)]
                    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("text", ["data=1", "filter=4", "spatial=1x8", "spatial=3x2", "channel=2"])
def test_ranks_that_hold_as_much_share_a_footprint_and_it_is_their_own(text):
    program = stage(text)
    found = footprints(program)
    assert list(found) == [footprint(program, rank) for rank in range(program.width)]
    if text == "filter=4":
        assert len({id(each) for each in found}) == 1


def test_what_readers_need_is_found_once_for_layers_that_repeat(monkeypatch):
    asked = []

    def counted(access, shape, outs):
        asked.append((access, shape, outs))
        return needed_by_all(access, shape, outs)

    monkeypatch.setattr(needs_module, "needed_by_all", counted)
    layers = [nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(12)]
    graph = capture(nn.Sequential(*layers), torch.zeros(2, 4, 16, 16), check=False)
    split = Split(Way.SPATIAL, (2, 2))
    program = lower_stage(graph, graph.layers, split, departures=graph.output_names)
    assert sum(isinstance(op, Compute) for op in program.ops) == 12
    # The image and the weight, once for all twelve.
    assert len(asked) == 2


def test_boxes_of_all_ranks_together_are_those_of_each():
    layer = small_graph().layers[1]
    outs = Layout(
        (4, 8, 16, 16), tuple(Box((0, 0, 4 * i, 0), (4, 8, 4 * i + 4, 16)) for i in range(4)), (0, 1, 2, 3)
    )
    for operand in layer.operands:
        shape = operand.spec.shape
        assert needed_by_all(operand.access, shape, outs.boxes) == tuple(
            needed(operand.access, shape, box) for box in outs.boxes
        )
