"""Halo exchange of a tile of 64x512x512: regrid against a hand-written mpi4py Isend/Irecv loop.

Both send packed rows from fixed buffers and both make a new, widened tile in every call: in training the old
one is still needed for the backward pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shardwise.geometry import Box, Layout, messages, tiles
from shardwise.runtime.regrid import bind_regrid
from shardwise.runtime.wire import wire_of

SHAPE = (1, 64, 1024, 512)


def measure(ranks: Any, effort: float) -> list[dict[str, Any]]:
    """Return the seconds of both, for halos of one and of four rows; both end with the widened tile."""
    import torch.distributed as dist

    rows = []
    for rim in (1, 4):
        src = tiles(SHAPE, (ranks.size, 1))
        boxes = tuple(_widened(box, rim) for box in src.boxes)
        dst = Layout(SHAPE, boxes, src.ranks)
        wire = wire_of(dist.group.WORLD, range(ranks.size))
        tile = torch.rand(src.boxes[ranks.rank].shape)
        there, _ = bind_regrid(
            src, dst, messages(src, dst), ranks.rank, wire, tile.dtype, tile.device, tag=rim
        )
        wanted = there(tile)
        by_hand = _by_hand(ranks, tile.numpy(), boxes[ranks.rank], src.boxes[ranks.rank], rim)
        if not np.array_equal(by_hand(), wanted.numpy()):
            raise SystemExit("the two halo exchanges disagree")
        kinds = {"by hand": lambda f=by_hand: f(), "regrid": lambda f=there, t=tile: f(t)}
        rows.append({"rows": rim} | ranks.median(kinds, max(5, int(40 * effort))))
    return rows


def _widened(box: Box, rim: int) -> Box:
    return box.replace(2, (max(0, box.lo[2] - rim), min(SHAPE[2], box.hi[2] + rim)))


def _by_hand(ranks: Any, tile: np.ndarray, wide: Box, own: Box, rim: int) -> Any:
    """Write the exchange as one would by hand: fixed buffers, Irecv first, then Isend, then Waitall."""
    up, down = own.lo[2] - wide.lo[2], wide.hi[2] - own.hi[2]
    edge = (tile.shape[0], tile.shape[1], rim, tile.shape[3])
    neighbours = ([(ranks.rank - 1, "up")] if up else []) + ([(ranks.rank + 1, "down")] if down else [])
    receive = {side: np.empty(edge, tile.dtype) for _, side in neighbours}
    send = {side: np.empty(edge, tile.dtype) for _, side in neighbours}
    height = tile.shape[2]

    def run() -> np.ndarray:
        requests = [ranks.comm.Irecv(receive[side], peer, 7) for peer, side in neighbours]
        for peer, side in neighbours:
            send[side][...] = tile[:, :, :rim] if side == "up" else tile[:, :, -rim:]
            requests.append(ranks.comm.Isend(send[side], peer, 7))
        result = np.empty(wide.shape, tile.dtype)
        result[:, :, up : up + height] = tile
        ranks.mpi.Request.Waitall(requests)
        if up:
            result[:, :, :up] = receive["up"]
        if down:
            result[:, :, up + height :] = receive["down"]
        return result

    return run
