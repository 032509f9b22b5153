"""What lowering makes of filter-channel pairs, of `halo=auto` and of `tail=auto`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.graph import Graph, capture
from shardwise.plan import Plan
from shardwise.program import Compute, Normalise, Regrid, StageProgram, candidates
from shardwise.program.lowered import lower


def lowered(model: nn.Module, line: str, shape: tuple[int, ...] = (2, 3, 16, 16)) -> StageProgram:
    graph: Graph = capture(model, torch.zeros(shape), training=True)
    return lower(graph, Plan.parse(line)).stage(0, 0, 0)


def regrids(program: StageProgram) -> list[Regrid]:
    return [op for op in program.ops if isinstance(op, Regrid)]


def convs(count: int, *between: type[nn.Module]) -> nn.Module:
    """Make convolutions that need a halo, with layers between them."""
    layers: list[nn.Module] = []
    for i in range(count):
        layers.append(nn.Conv2d(3 if i == 0 else 6, 6, 3, padding=1))
        layers += [kind(6) if kind is nn.BatchNorm2d else kind() for kind in between]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("count", [2, 4, 6])
def test_a_pair_of_layers_needs_one_sum_and_nothing_else(count: int) -> None:
    model = convs(count, nn.BatchNorm2d, nn.ReLU)
    program = lowered(model, "pairs=2")
    found = regrids(program)
    # One per pair forwards; backward runs the same list reversed, so one per pair there too.
    assert len(found) == count // 2
    assert all(op.source.layout.partial and op.makes.layout.is_whole for op in found)
    assert not any(isinstance(op, Normalise) for op in program.ops)
    weights = [program.parameters[name] for name in program.parameters if name.endswith("weight")]
    cut = [{box.shape[0] for box in layout.boxes} for layout in weights if len(layout.shape) == 4]
    assert cut == [{3}, {6}] * (count // 2)
    # The same layers split one way exchange something around every layer.
    assert len(regrids(lowered(model, "filter=2"))) == count - 1
    assert len(regrids(lowered(model, "channel=2"))) == count


def test_a_pair_passes_through_a_depthwise_layer_and_a_pool() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, groups=6), nn.MaxPool2d(2), nn.Conv2d(6, 5, 3)
    )
    (only,) = regrids(lowered(model, "pairs=2"))
    assert only.source.layout.partial
    assert only.source.value == "3"


def test_halo_auto_fuses_where_that_saves_an_exchange() -> None:
    plain, normed = convs(4, nn.ReLU), convs(4, nn.BatchNorm2d, nn.ReLU)
    big = (1, 3, 128, 128)
    for grid in ("spatial=2", "spatial=2x2"):
        fused = len(regrids(lowered(plain, f"{grid} halo=fused", big)))
        assert len(regrids(lowered(plain, f"{grid} halo=auto", big))) == fused < 3
        # Statistics that ranks share make them wait for one another anyway: there it is as `layer`.
        assert lowered(normed, f"{grid} halo=auto", big) == lowered(normed, f"{grid} halo=layer", big)
        alone = len(regrids(lowered(normed, f"{grid} halo=auto batch_norm=local", big)))
        assert alone == len(regrids(lowered(normed, f"{grid} halo=layer", big)))


def test_halo_auto_does_not_widen_what_saves_nothing() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))
    program = lowered(model, "spatial=2 halo=auto", (1, 3, 64, 64))
    (norm,) = [op for op in program.ops if isinstance(op, Normalise)]
    assert norm.rectifies
    assert [box.shape[2] for box in norm.makes.layout.boxes] == [32, 32]


class Deep(nn.Module):
    """Halve the image four times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv2d(3, 3, 3, 2, 1) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def cut_dims(program: StageProgram) -> list[tuple[int, ...]]:
    """Return which dimensions of each layer's output differ from rank to rank."""
    result = []
    for op in program.ops:
        if isinstance(op, Compute):
            boxes = op.makes.layout.boxes
            spans = [{box.ranges[d] for box in boxes} for d in range(4)]
            result.append(tuple(d for d, span in enumerate(spans) if len(span) > 1))
    return result


def test_tail_auto_shares_samples_where_tiles_are_too_short_to_pay() -> None:
    # 32 rows, then 16, 8, 4, 2: on two ranks the tiles have 8, 4, 2 and 1 of them.
    rows, samples, nothing = (2,), (0,), ()
    model = Deep()
    assert cut_dims(lowered(model, "spatial=2", (2, 3, 32, 32))) == [rows, rows, samples, samples]
    # Too few samples: tiles share the work better than whole copies, as long as there are pixels.
    assert cut_dims(lowered(model, "spatial=2", (1, 3, 32, 32))) == [rows] * 4
    assert cut_dims(lowered(model, "spatial=2", (1, 3, 16, 32))) == [rows] * 3 + [nothing]
    assert cut_dims(lowered(model, "spatial=2 tail=batch", (2, 3, 32, 32))) == [rows] * 4


def test_candidates_leave_nothing_open_but_start_with_the_rules() -> None:
    plan = Plan.parse("stages=2x1|1 halo=auto micro_batches=2")
    found = candidates(plan)
    assert found[0] == plan
    assert len(set(found)) == len(found)
    assert {p.halo for p in found} >= {"layer", "fused"}
    assert {p.tail for p in found} >= {"batch", "replicate", "filter"}
    assert all(p.replace(halo="auto", tail="auto") == plan for p in found)
    assert candidates(Plan.parse("spatial=2 halo=2 tail=batch")) == (
        Plan.parse("spatial=2 halo=2 tail=batch"),
    )
    assert candidates(Plan.parse("filter=2")) == (Plan.parse("filter=2"),)


class Spread(nn.Module):
    """Spread means over rows or over channels out again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.mean(3, keepdim=True).expand(-1, -1, -1, 16)
        return rows + x.mean(1, keepdim=True).expand(2, 3, 16, 16)


def test_what_is_expanded_is_made_tile_by_tile() -> None:
    program = lowered(Spread(), "spatial=2")
    made = [
        op.makes.layout.boxes for op in program.ops if isinstance(op, Compute) and op.layer.op == "expand"
    ]
    assert [[box.shape for box in boxes] for boxes in made] == [[(2, 3, 8, 16)] * 2] * 2
