"""What other implementations get wrong or refuse, each by name; and what ours got wrong once."""

from __future__ import annotations

import pytest
import torch

from ranks import run_ranks
from shardwise.graph import capture
from shardwise.plan import Plan
from shardwise.program.lower import lower_stage
from transparency.harness import Case, check, prepare, split
from transparency.small_models import SMALL

ODD, EVEN = (3, 3, 21, 18), (2, 3, 16, 18)

HY_FI = {
    # The public Hy-Fi code, measured: what is wrong there, and the case that shows it.
    "halos keep their gradients": Case("conv3 twice", ODD, "spatial=2x1"),
    "early weights get all of their gradient": Case("deep chain", ODD, "spatial=1x2"),
    "batch norm counts all tiles": Case("batch norm", ODD, "spatial=2x2"),
    "fused halos are right at the image's border": Case(
        "deep chain", (2, 3, 33, 40), "spatial=2x2 halo=fused"
    ),
    "fused halos hold batch norm": Case("deep chain with norms", (2, 3, 48, 40), "spatial=2x2 halo=3"),
    "max pool ignores padding": Case("max pool 3", ODD, "spatial=2x2"),
    "average pool counts pixels only": Case("avg pool uncounted", ODD, "spatial=2x2"),
    "tile gradients are summed": Case("conv3", EVEN, "spatial=1x4"),
    "pipeline gradients are not multiplied": Case("conv3", (4, 3, 16, 18), "stages=2 micro_batches=4"),
    "both directions start from the model's weights": Case(
        "conv3", (4, 3, 16, 18), "stages=2 spatial=2x1 schedule=gems-mast"
    ),
    "groups are kept": Case("conv groups", ODD, "spatial=2x1"),
    "padding modes are kept": Case("conv reflect", ODD, "spatial=2x2"),
    "circular padding wraps to the far rank": Case("conv circular", ODD, "spatial=1x3"),
    "stride 2 on width 18 makes 9 columns": Case("conv3 stride 2", EVEN, "spatial=1x2"),
}
PEERS = {
    "PhysicsNeMo: padded convolutions with stride": Case("conv3 stride 2", ODD, "spatial=2x2"),
    "PhysicsNeMo: even kernels": Case("conv4", ODD, "spatial=3x1"),
    "PhysicsNeMo: pooling with stride unlike kernel": Case("max pool 3 stride 2", ODD, "spatial=2x2"),
    "PhysicsNeMo: odd transposed kernels": Case("transposed 3", ODD, "spatial=2x2"),
    "PhysicsNeMo: batch norm": Case("deep chain with norms", ODD, "spatial=3x1"),
    "PhysicsNeMo: more than one sample per group": Case("conv3", (5, 3, 16, 18), "spatial=2x1"),
    "DTensor: 3x3 with padding 1 on tiles": Case("conv3", ODD, "spatial=1x3"),
    "DTensor: two convolutions in a row": Case("conv3 twice", ODD, "spatial=2x2"),
    "DistConv: dilation without padding on odd sizes": Case("conv dilated", ODD, "spatial=2x2"),
    "pipelining: a skip across stages under 1f1b": Case("skip", (4, 3, 16, 18), "stages=3 micro_batches=4"),
    "pipelining: a last uneven micro-batch": Case("conv3", (5, 3, 16, 18), "stages=2 micro_batches=2"),
}
OURS = {
    "one gradient for two readers is not added to twice": Case("shared gradient", ODD, "spatial=2x1"),
    "tiles smaller than their halos": Case("deep chain", (2, 3, 9, 12), "spatial=1x4 halo=fused"),
    "a rank without samples has no gradient, and sends zeros": Case(
        "random", (3, 3, 29, 23), "spatial=1x4 tail=batch", settings=(("seed", 2), ("size", (29, 23)))
    ),
    "tiles without pixels": Case("conv3 stride 2", (2, 3, 3, 18), "spatial=4x1 tail=replicate"),
    "an opaque module between tiled layers": Case("opaque", ODD, "spatial=2x2"),
    "a grid of one number cuts rows": Case("skip", ODD, "spatial=3 halo=auto"),
    "pairs of filters and channels with a skip": Case("skip", ODD, "pairs=2"),
    "pairs on more ranks than channels divide by": Case("deep chain with norms", ODD, "pairs=3"),
    "parameters that nothing uses": Case("unused", ODD, "spatial=2x1"),
}
CASES = HY_FI | PEERS | OURS


@pytest.mark.parametrize("name", list(CASES))
def test_regression(name: str) -> None:
    # Alternate: every other case on Gloo.
    check(CASES[name], ("mpi4py", "gloo")[list(CASES).index(name) % 2])


def test_stride_2_on_width_18_over_two_tiles_makes_5_and_4_columns() -> None:
    model, x = SMALL["conv3 stride 2"](), torch.randn(EVEN)
    graph = capture(model, x)
    program = lower_stage(
        graph, graph.layers, Plan.parse("spatial=1x2").stages[0], departures=graph.output_names
    )
    (held,) = program.departures.values()
    assert [box.shape[3] for box in held.layout.boxes] == [5, 4]


def test_each_rank_reads_only_its_window_of_the_image() -> None:
    model, x = SMALL["conv3"](), torch.randn(2, 3, 64, 64)
    graph = capture(model, x)
    program = lower_stage(
        graph, graph.layers, Plan.parse("spatial=2x2").stages[0], departures=graph.output_names
    )
    (held,) = program.arrivals.values()
    # Half of each side, and one pixel of halo for each of the two 3x3 layers' first exchange.
    assert [box.shape for box in held.layout.boxes] == [(2, 3, 33, 33)] * 4


def weights_after_one_step(case: Case) -> tuple[float, float]:
    model, _, _ = prepare(case)
    first = float(sum(p.abs().sum() for p in model.parameters()))
    return first, float(sum(t.abs().sum() for t in split(case).state.values()))


def test_bidirectional_tiles_do_not_start_from_zero() -> None:
    case = Case("conv3", (4, 3, 16, 18), "stages=2 spatial=2x1 schedule=gems-mast", steps=1)
    for before, after in run_ranks(weights_after_one_step, case.ranks, "mpi4py", (case,)):
        assert after > 0.5 * before > 0.0
