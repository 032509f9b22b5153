"""Exchanges of a stage take turns with one memory."""

import torch

from shardwise import capture
from shardwise.geometry import Box, Message
from shardwise.plan import Split
from shardwise.plan.split import Way
from shardwise.program import Regrid, lower_stage
from shardwise.runtime.regrid import Exchange, Scratch
from shardwise.runtime.stage import _scratch
from shardwise.runtime.wire import LoneWire

CPU = torch.device("cpu")


class Hollow(LoneWire):
    """A wire that notes the buffers."""

    def line(self, receives, sends, tag, what):
        self.parcels = [*receives, *sends]
        return super().line((), (), tag, what)


def bound(scratch, dtype, width):
    """An exchange that sends `width` columns to rank 1 and receives as many."""
    wire = Hollow()
    whole = Box((0, 0), (4, 8))
    messages = [
        Message(0, 0, whole),
        Message(0, 1, Box((0, 0), (4, width))),
        Message(1, 0, Box((0, 8 - width), (4, 8))),
    ]
    exchange = Exchange(0, messages, whole, whole, wire, dtype, CPU, scratch=scratch)
    return exchange, [p.buffer for p in wire.parcels], messages


def test_two_exchanges_use_the_same_memory_and_the_buffers_of_one_do_not_overlap():
    scratch = Scratch(1024, CPU)
    first, second = bound(scratch, torch.float32, 3), bound(scratch, torch.float64, 5)
    for exchange, buffers, messages in (first, second):
        assert exchange.nbytes == 0
        assert len(buffers) == 2
        starts = sorted((b.data_ptr(), b.nbytes) for b in buffers)
        assert starts[0][0] + starts[0][1] <= starts[1][0]
        assert all(start % 8 == 0 for start, _ in starts)
        used = starts[-1][0] + starts[-1][1] - starts[0][0]
        assert used <= Scratch.needs(messages, buffers[0].element_size()) <= scratch.nbytes
    assert first[1][0].data_ptr() == second[1][0].data_ptr()


def test_an_exchange_without_scratch_has_buffers_of_its_own():
    exchange, buffers, _ = bound(None, torch.float32, 3)
    assert exchange.nbytes == sum(b.nbytes for b in buffers) == 2 * 4 * 3 * 4


def test_a_stage_needs_as_much_as_its_largest_exchange():
    layers = [torch.nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 4), (4, 8), (8, 2))]
    graph = capture(torch.nn.Sequential(*layers), torch.zeros(1, 3, 16, 16), check=False)
    split = Split(Way.SPATIAL, (2, 1))
    program = lower_stage(graph, graph.layers, split, departures=graph.output_names)
    sizes = [Scratch.needs(op.messages_of(0), 4) for op in program.ops if isinstance(op, Regrid)]
    assert len(sizes) > 1
    found = _scratch(program.ops, 0, CPU)
    assert found.nbytes == max(sizes) < sum(sizes)
