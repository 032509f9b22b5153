"""What other implementations get wrong or refuse, each by name; and what ours got wrong once."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranks import run_ranks
from shardwise.graph import capture
from shardwise.plan import Plan
from shardwise.program import Regrid
from shardwise.program.lower import lower_stage
from shardwise.training.trainer import Trainer
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
    "tiles smaller than their halos": Case("deep chain", (2, 3, 9, 12), "spatial=1x4 halo=6"),
    "a rank without samples has no gradient, and sends zeros": Case(
        "random", (3, 3, 29, 23), "spatial=1x4 tail=batch", settings=(("seed", 2), ("size", (29, 23)))
    ),
    "tiles without pixels": Case("conv3 stride 2", (2, 3, 3, 18), "spatial=4x1 tail=replicate"),
    "an opaque module between tiled layers": Case("opaque", ODD, "spatial=2x2"),
    "a grid of one number cuts rows": Case("skip", ODD, "spatial=3 halo=auto"),
    "pairs of filters and channels with a skip": Case("skip", ODD, "pairs=2"),
    "pairs on more ranks than channels divide by": Case("deep chain with norms", ODD, "pairs=3"),
    "batch norm counts the frames of all replicas": Case("frames", (4, 6, 9, 11), "data=2"),
    "batch norm counts the frames of an uneven batch": Case("frames", (3, 6, 9, 11), "data=2 spatial=2x1"),
    "batch norm counts both twins of all replicas": Case("twins", (4, 3, 9, 10), "data=2"),
    "one dimension": Case("signal", (3, 3, 37), "spatial=3"),
    "one dimension with fused halos": Case("signal", (2, 3, 41), "spatial=2 halo=fused"),
    "filters behind tiles": Case("narrowing", ODD, "spatial=2x2 tail=filter"),
    "filters behind tiles of two replicas": Case("narrowing", ODD, "data=2 spatial=2x1 tail=filter"),
    "a sum of channels in front of a convolution that is padded on one side": Case(
        "random", (3, 3, 32, 24), "channel=2", settings=(("seed", 16), ("size", (32, 24)))
    ),
    "a sum of channels in front of a circular convolution": Case(
        "random", (3, 3, 29, 23), "pairs=2", settings=(("seed", 5), ("size", (29, 23)))
    ),
    "parameters that nothing uses": Case("unused", ODD, "spatial=2x1"),
}
CASES = HY_FI | PEERS | OURS


@pytest.mark.parametrize("transport", ["mpi4py", "gloo"])
@pytest.mark.parametrize("name", list(CASES))
def test_regression(name: str, transport: str) -> None:
    check(CASES[name], transport)


def test_halos_reach_beyond_the_neighbours_tile() -> None:
    case = OURS["tiles smaller than their halos"]
    graph = capture(prepare(case)[0], torch.randn(case.shape, dtype=torch.float64))
    plan = Plan.parse(case.plan)
    program = lower_stage(
        graph, graph.layers, plan.stages[0], departures=graph.output_names, halo=plan.halo, tail=plan.tail
    )
    moved = [m for op in program.ops if isinstance(op, Regrid) for m in op.messages]
    arrived = [m for m in moved if not m.box.empty]
    assert max(abs(m.source - m.target) for m in arrived) >= 2


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


class Tied(nn.Module):
    """A weight of two names, and a buffer that is not to be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x) + self.shift))


def names_of_tied() -> tuple[list[str], bool]:
    """Return the names in a trainer's state, and whether the user's model takes them."""
    torch.manual_seed(0)
    model, x = Tied(), torch.randn(2, 3, 8, 8)
    trainer = Trainer(model, (x, x), "spatial=2x1", loss=F.mse_loss)
    trainer.step(x, x)
    state = trainer.state_dict()
    fresh = Tied()
    fresh.load_state_dict(state, strict=True)
    return sorted(state), torch.equal(fresh.second.weight, fresh.first.weight)


def test_a_trainers_state_has_the_names_of_the_users_model() -> None:
    for names, same in run_ranks(names_of_tied, 2):
        assert names == sorted(Tied().state_dict())
        assert same


def stages_left_behind() -> int:
    """Return how many stages of trainers that are gone the model's weights still hold."""
    torch.manual_seed(0)
    model, x = SMALL["deep chain"](), torch.randn(2, 3, 16, 16)
    stages = []
    for _ in range(2):
        trainer = Trainer(model, (x, model(x).detach()), "spatial=2x1", loss=F.mse_loss)
        trainer.step(x, model(x).detach())
        engine = next(iter(trainer._engines.values()))
        stages += [weakref.ref(stage) for stage in engine.stages.values()]
        del trainer, engine
    gc.collect()
    return sum(stage() is not None for stage in stages)


def test_weights_do_not_keep_the_trainers_that_are_gone() -> None:
    assert run_ranks(stages_left_behind, 2) == [0, 0]
