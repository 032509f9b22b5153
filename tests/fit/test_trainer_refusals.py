"""What a trainer refuses because it would train on to something else, and that the rest equals one device."""

from __future__ import annotations

import exact_workers as workers
import pytest

from ranks import RankError, run_ranks

BOUND = 1e-10


@pytest.mark.parametrize("plan", ["data=2", "stages=2 micro_batches=2", "spatial=2x1"])
def test_plain_numbers_that_change_are_refused_and_tensors_are_not(plan):
    for said in run_ranks(workers.mixed_up, 2, args=(plan, False)):
        assert said.startswith("y: found the plain numbers [0.9], the example had [0.3]")
        assert "as a tensor with one value per sample" in said
    for error in run_ranks(workers.mixed_up, 2, args=(plan, True)):
        assert error < BOUND


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
@pytest.mark.parametrize("plan", ["filter=2", "channel=2"])
def test_an_optimizer_that_reads_whole_tensors_is_refused_slices(name, plan):
    for said in run_ranks(workers.optimized, 2, args=(plan, name)):
        assert f"optimizer: {name} updates an element by more" in said
        assert "1.weight" in said


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("Adafactor", "data=2"),
        ("Muon", "data=2"),
        ("Muon", "stages=2 cuts=2"),
        ("NAdam", "filter=2"),
        ("Rprop", "channel=2"),
    ],
)
def test_an_optimizer_that_has_all_it_reads_equals_one_device(name, plan):
    for error in run_ranks(workers.optimized, 2, args=(plan, name)):
        # Muon orthogonalises in 16 bits, where the last bits of gradients count for more.
        assert error < (1e-2 if name == "Muon" else BOUND)


@pytest.mark.parametrize(("plan", "ranks"), [("data=1", 1), ("data=2", 2), ("stages=2 cuts=2", 2)])
def test_an_optimizer_that_wants_to_run_the_model_is_refused(plan, ranks):
    for said in run_ranks(workers.optimized, ranks, args=(plan, "LBFGS")):
        assert "LBFGS.step needs a closure" in said


@pytest.mark.parametrize("plan", ["stages=2 cuts=1", "stages=2 cuts=1 micro_batches=2"])
def test_a_value_of_another_precision_than_planned_is_refused_where_it_is_sent(plan):
    said = r"0 of micro-batch 0: found torch.bfloat16, the model was captured with torch.float32"
    with pytest.raises(RankError, match=said):
        run_ranks(workers.under_autocast, 2, args=(plan,))


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [("stages=2 cuts=pool", 2), ("stages=2 cuts=tanh", 2), ("stages=4", 4), ("stages=2 micro_batches=2", 2)],
)
def test_stages_around_a_layer_of_several_results_equal_one_device(plan, ranks):
    for error in run_ranks(workers.unpooled, ranks, args=(plan,)):
        assert error < BOUND


def test_a_cut_between_a_layer_of_several_results_and_its_readers_is_refused():
    for said in run_ranks(workers.unpooled, 2, args=("stages=2 cuts=pool.0",)):
        assert "the layer 'pool' returns several tensors" in said
        assert "cut before 'pool', or before 'tanh'" in said
