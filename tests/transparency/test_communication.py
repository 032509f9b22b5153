"""All ranks communicate in one order: every sum meets the same sum, every message its receive."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from ranks import run_ranks
from shardwise.runtime import fabric
from shardwise.runtime.wire import Line, Parcel, Pending, Wire, wire_of
from transparency.harness import Case, split

Event = tuple[str, tuple[int, ...], int, str]
"""What happened (sum, send or receive), among which world ranks, with how many elements, and for what."""


class RecordingLine:
    def __init__(self, line: Line, events: list[Event], log: list[Event]) -> None:
        self.line, self.events, self.log = line, events, log

    def start(self) -> None:
        self.log += self.events
        self.line.start()

    def finish(self) -> None:
        self.line.finish()


class RecordingWire:
    """Note everything that passes a wire."""

    def __init__(self, wire: Wire, ranks: Sequence[int], log: list[Event]) -> None:
        self.wire, self.ranks, self.log = wire, tuple(ranks), log
        self.me = dist.get_rank()

    def _event(self, act: str, parcel: Parcel, tag: int) -> Event:
        peer = self.ranks[parcel.peer]
        ends = (self.me, peer) if act == "send" else (peer, self.me)
        return (act, ends, parcel.buffer.numel(), f"tag {tag}")

    def send(self, parcel: Parcel, tag: int, what: str) -> Pending:
        self.log.append(self._event("send", parcel, tag))
        return self.wire.send(parcel, tag, what)

    def receive(self, parcel: Parcel, tag: int, what: str) -> Pending:
        self.log.append(self._event("receive", parcel, tag))
        return self.wire.receive(parcel, tag, what)

    def line(self, receives: Sequence[Parcel], sends: Sequence[Parcel], tag: int, what: str) -> Line:
        events = [self._event("receive", p, tag) for p in receives]
        events += [self._event("send", p, tag) for p in sends]
        return RecordingLine(self.wire.line(receives, sends, tag, what), events, self.log)

    def prepare_sums(self) -> None:
        self.wire.prepare_sums()

    @property
    def shared_bytes(self) -> int:
        return 0

    def all_reduce(self, tensor: Tensor) -> None:
        self.log.append(("sum", tuple(sorted(self.ranks)), tensor.numel(), ""))
        self.wire.all_reduce(tensor)

    def start_all_reduce(self, tensor: Tensor, what: str, *, in_turn: bool = False) -> Pending:
        self.log.append(("sum", tuple(sorted(self.ranks)), tensor.numel(), ""))
        return self.wire.start_all_reduce(tensor, what, in_turn=in_turn)


def recorded(case: Case) -> list[Event]:
    log: list[Event] = []
    with mock.patch.object(
        fabric, "wire_of", lambda group, ranks: RecordingWire(wire_of(group, ranks), ranks, log)
    ):
        split(case)
    return log


CASES = {
    "tiles with batch norm": Case("deep chain with norms", (2, 3, 21, 18), "spatial=2x2"),
    "fused tiles": Case("deep chain with norms", (2, 3, 40, 36), "spatial=2x2 halo=fused"),
    "tiles without pixels": Case("conv3 stride 2", (2, 3, 3, 18), "spatial=4x1 tail=replicate"),
    "a random network by filters": Case(
        "random", (3, 3, 29, 23), "filter=2", "mse", (("seed", 3), ("size", (29, 23)))
    ),
    "a random network on three tiles": Case(
        "random", (3, 3, 29, 23), "spatial=3x1", "mse", (("seed", 4), ("size", (29, 23)))
    ),
    "channels": Case("deep chain with norms", (2, 3, 21, 18), "channel=2"),
    "pairs of filters and channels": Case("skip", (2, 3, 21, 18), "pairs=2"),
    "samples": Case("deep chain with norms", (3, 3, 21, 18), "batch=2"),
    "filters behind tiles": Case("narrowing", (3, 3, 21, 18), "spatial=2x2 tail=filter"),
    "replicas of tiles": Case("deep chain with norms", (4, 3, 21, 18), "data=2 spatial=2x1"),
    "stages of tiles": Case("skip", (4, 3, 16, 18), "stages=2 spatial=2x1 micro_batches=2"),
}


@pytest.mark.parametrize("transport", ["mpi4py", "gloo"])
@pytest.mark.parametrize("name", list(CASES))
def test_all_ranks_communicate_in_one_order(name: str, transport: str) -> None:
    case = CASES[name]
    logs: list[list[Event]] = run_ranks(recorded, case.ranks, transport, (case,))
    assert any(logs)
    # Every group of ranks adds up the same tensors in the same order.
    groups = {event[1] for log in logs for event in log if event[0] == "sum"}
    for group in groups:
        orders = [[e[2] for e in logs[rank] if e[:2] == ("sum", group)] for rank in group]
        assert all(order == orders[0] for order in orders), f"ranks {group} add up in different orders"
    # Between any two ranks, messages are sent in the order in which they are expected.
    sent: dict[tuple[int, ...], list[tuple[int, str]]] = defaultdict(list)
    expected: dict[tuple[int, ...], list[tuple[int, str]]] = defaultdict(list)
    for log in logs:
        for act, ends, count, tag in log:
            if act != "sum":
                (sent if act == "send" else expected)[ends].append((count, tag))
    assert sent.keys() == expected.keys()
    for ends in sent:
        # A receive may be posted ahead of time; messages with one tag keep their order.
        assert sorted(sent[ends]) == sorted(expected[ends]), f"rank {ends[0]} to {ends[1]}"
        for tag in {t for _, t in sent[ends]}:
            first = [count for count, t in sent[ends] if t == tag]
            assert first == [count for count, t in expected[ends] if t == tag]
