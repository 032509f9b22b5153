"""Add large tensors up on a shelf: boards of memory that all ranks of a group on one node can see.

A tensor is cut into parts, each part into one share for every rank, and a part passes over a board in three
moves. No move waits inside: who finds that the others are not there yet goes on computing.

    lay:   every rank puts the shares of the others on its side of the board
    add:   every rank adds what the others laid to its own share, and puts the sum there
    take:  every rank copies the sums of the others

So all ranks do the same work, whoever comes first, and every sum is made by one rank only: it is the same to
the last bit everywhere. Boards are used in turn; one is free again when all ranks have taken from it. Parts
are so large that what one core wrote has left its own cache before another one reads it, which is faster.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.runtime.mpi.shared import share_memory
from shardwise.runtime.mpi.table import MOST_RANKS
from shardwise.runtime.poller import Poller

PART_BYTES = 4 << 20
SMALLEST_BYTES = 128 << 10
"""Below this a sum by messages is done sooner."""
BOARDS = 2
_DTYPES = (torch.float32, torch.float64)
_LINE_BYTES = 64
_LAID, _ADDED, _TAKEN = range(3)


class Sum:
    """A tensor on its way over the shelf."""

    def __init__(self, shelf: Shelf, parts: int) -> None:
        self._shelf, self.left = shelf, parts

    def Test(self) -> bool:
        """Move on whatever can be moved; tell whether the tensor holds the sum."""
        if self.left:
            self._shelf.advance()
        if self.left:
            # A message that another rank needs first may want to be driven.
            self._shelf.drive()
        return not self.left


class Shelf:
    """This rank's place at the shelf of a group; all of its ranks start the same sums in the same order."""

    def __init__(
        self, rank: int, size: int, memory: mmap.mmap, others: Sequence[int], poller: Poller
    ) -> None:
        self._poller, self._others, self._rank, self._size = poller, tuple(others), rank, size
        counts = memoryview(memory)[: size * _LINE_BYTES].cast("q")
        step = _LINE_BYTES // 8
        # How many parts each rank has laid, added and taken, on a cache line of its own.
        self._counts = [counts[move::step] for move in (_LAID, _ADDED, _TAKEN)]
        bytes_ = torch.frombuffer(
            memory, dtype=torch.uint8, offset=size * _LINE_BYTES, count=BOARDS * size * PART_BYTES
        )
        self._boards = bytes_.view(BOARDS, size, PART_BYTES)
        self._views: dict[tuple[torch.dtype, int], list[list[list[Tensor]]]] = {}
        # Parts that are not taken yet: their own shares and the sum they belong to.
        self._parts: deque[tuple[list[Tensor], list[list[Tensor]], Sum]] = deque()
        self._done = [0, 0, 0]
        self._fence = threading.Lock()
        self._moving = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Return how much of this rank's side of all boards was used so far."""
        largest = max((length * dtype.itemsize for dtype, length in self._views), default=0)
        return BOARDS * largest

    def start(self, tensor: Tensor) -> Sum:
        """Start to add up a contiguous tensor of all ranks, in place."""
        row = tensor.detach().view(-1)
        length = PART_BYTES // row.element_size()
        rows = torch.split_with_sizes(
            row, [min(length, row.numel() - at) for at in range(0, row.numel(), length)]
        )
        total = Sum(self, len(rows))
        first = self._done[_TAKEN] + len(self._parts)
        for i, part in enumerate(rows):
            boards = self._sides(part)
            self._parts.append((self._shares(part), boards[(first + i) % BOARDS], total))
        self.advance()
        return total

    def advance(self) -> None:
        """Move parts on as far as the other ranks have come."""
        # The garbage collector may come by in the middle of a move, and test sums that nobody waits for.
        if not self._moving.acquire(blocking=False):
            return
        try:
            moved = True
            while moved:
                moved = self._move(_LAID, _TAKEN, BOARDS)
                moved |= self._move(_ADDED, _LAID)
                moved |= self._move(_TAKEN, _ADDED)
        finally:
            self._moving.release()

    def drive(self) -> None:
        """Let messages go on that are under way beside the sums."""
        if self._poller.drive is not None:
            self._poller.drive()

    def _move(self, move: int, behind: int, ahead: int = 0) -> bool:
        """Do a move for all parts of which all ranks have done the one before it; tell whether any was."""
        known = self._done[_TAKEN] + len(self._parts)
        last = min(known, min(self._counts[behind]) + ahead)
        if last <= self._done[move]:
            return False
        self._settle()  # the counts were read before what they speak of
        while self._done[move] < last:
            shares, board, total = self._parts[self._done[move] - self._done[_TAKEN]]
            _MOVES[move](self._rank, shares, board)
            if move == _TAKEN:
                self._parts.popleft()
                total.left -= 1
            self._done[move] += 1
            self._settle()  # what was moved is seen before the count
            self._counts[move][self._rank] = self._done[move]
        self._settle()  # and the count before it is looked at who sleeps
        self._poller.ring(self._others)
        return True

    def _settle(self) -> None:
        """Let nothing that was read or written before be seen after what follows."""
        # One lock alone lets both sides move into it.
        for _ in range(2):
            with self._fence:
                pass

    def _shares(self, part: Tensor) -> list[Tensor]:
        """Return the share of every rank."""
        return list(torch.tensor_split(part, self._size))

    def _sides(self, part: Tensor) -> list[list[list[Tensor]]]:
        """Return for every board, and every rank's side of it, the shares of all ranks."""
        key = (part.dtype, part.numel())
        if key not in self._views:
            self._views[key] = [
                [self._shares(side[: part.nbytes].view(part.dtype)) for side in board]
                for board in self._boards
            ]
        return self._views[key]


def _lay(rank: int, shares: list[Tensor], board: list[list[Tensor]]) -> None:
    for other, share in enumerate(shares):
        if other != rank:
            board[rank][other].copy_(share)


def _add(rank: int, shares: list[Tensor], board: list[list[Tensor]]) -> None:
    for other, side in enumerate(board):
        if other != rank:
            shares[rank].add_(side[rank])
    board[rank][rank].copy_(shares[rank])


def _take(rank: int, shares: list[Tensor], board: list[list[Tensor]]) -> None:
    for other, share in enumerate(shares):
        if other != rank:
            share.copy_(board[other][other])


_MOVES = {_LAID: _lay, _ADDED: _add, _TAKEN: _take}


def fits(tensor: Tensor) -> bool:
    """Tell whether a tensor is large and plain enough for a shelf, by what is the same on all ranks."""
    return tensor.is_cpu and tensor.dtype in _DTYPES and tensor.nbytes >= SMALLEST_BYTES


def put_up_shelf(comm: Any, ranks: Sequence[int], me: int, poller: Poller) -> Shelf | None:
    """Return this rank's place, or None if the ranks share no memory; collective over the communicator."""
    size = comm.Get_size()
    if size > MOST_RANKS:
        return None
    nbytes = size * (_LINE_BYTES + BOARDS * PART_BYTES)
    memory = share_memory(comm, nbytes, ranks, me, poller, "a shelf for large sums")
    others = [r for r in ranks if r != me]
    return None if memory is None else Shelf(comm.Get_rank(), size, memory, others, poller)
