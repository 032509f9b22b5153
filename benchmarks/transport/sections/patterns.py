"""Regular regrids: regrid's batched messages against the collective that does the same, on MPI and on Gloo.

    gather    rows -> whole copies        all-gather
    reduce    partial sums -> rows        reduce-scatter
    turn      channels -> rows            all-to-all

Both ways start from the same tile and end with the same tensor; the collective's packing is written out.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.geometry import Layout, channel, messages, tiles, whole
from shardwise.runtime.regrid import bind_regrid
from shardwise.runtime.wire import wire_of

# Bytes of the whole tensor of 16 channels and rows of 64 numbers.
SIZES = [1 << 16, 1 << 20, 1 << 24]


def measure(ranks: Any, effort: float) -> list[dict[str, Any]]:
    """Return the seconds of both ways by pattern, transport and size."""
    # The names torch has for them since 2.13 are not in the versions before.
    warnings.simplefilter("ignore", FutureWarning)
    rows = []
    for transport, group in (("mpi4py", dist.group.WORLD), ("gloo", ranks.gloo)):
        for size in SIZES:
            shape = (1, 16, size // (16 * 64 * 4), 64)
            for name, (src, dst, collective) in _patterns(shape, ranks, group).items():
                tile = torch.rand(src.box(ranks.rank).shape)
                wire = wire_of(group, range(ranks.size))
                there, _ = bind_regrid(
                    src, dst, messages(src, dst), ranks.rank, wire, tile.dtype, tile.device, tag=11
                )
                if not torch.allclose(there(tile), collective(tile)):
                    raise SystemExit(f"{name}: messages and collective disagree")
                kinds = {
                    "messages": lambda f=there, t=tile: f(t),
                    "collective": lambda f=collective, t=tile: f(t),
                }
                rounds = max(5, int(effort * (40 if size < 1 << 24 else 10)))
                what = {"pattern": name, "transport": transport, "bytes": size, "ranks": ranks.size}
                rows.append(what | ranks.median(kinds, rounds))
    return rows


def _patterns(
    shape: tuple[int, ...], ranks: Any, group: Any
) -> dict[str, tuple[Layout, Layout, Callable[[Tensor], Tensor]]]:
    n, members = ranks.size, tuple(range(ranks.size))
    by_rows = tiles(shape, (n, 1))
    copies, by_channels = whole(shape, members), channel(shape, n, members)
    per, high = shape[1] // n, shape[2] // n
    joined = torch.empty(n, 1, shape[1], high, shape[3])
    cut = torch.empty(n, 1, shape[1], high, shape[3])
    thin, thin_joined = torch.empty(n, 1, per, high, shape[3]), torch.empty(n, 1, per, high, shape[3])

    def gather(tile: Tensor) -> Tensor:
        dist.all_gather_into_tensor(joined.view(-1), tile.view(-1), group=group)
        return joined.permute(1, 2, 0, 3, 4).reshape(shape)

    def reduce(tile: Tensor) -> Tensor:
        cut.copy_(tile.view(1, shape[1], n, high, shape[3]).permute(2, 0, 1, 3, 4))
        result = torch.empty(1, shape[1], high, shape[3])
        dist.reduce_scatter_tensor(result.view(-1), cut.view(-1), group=group)
        return result

    def turn(tile: Tensor) -> Tensor:
        thin.copy_(tile.view(1, per, n, high, shape[3]).permute(2, 0, 1, 3, 4))
        dist.all_to_all_single(thin_joined.view(-1), thin.view(-1), group=group)
        return thin_joined.permute(1, 0, 2, 3, 4).reshape(1, shape[1], high, shape[3])

    return {
        "gather": (by_rows, copies, gather),
        "reduce": (copies.as_partial(True), by_rows, reduce),
        "turn": (by_channels, by_rows, turn),
    }
