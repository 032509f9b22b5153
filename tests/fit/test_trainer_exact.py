"""Split training equals one device: shares without samples, changing sizes, every schedule, every count."""

from __future__ import annotations

import fit_cases as cases
import fit_workers as workers
import pytest
import torch.nn.functional as F

from ranks import run_ranks

BOUND = 1e-10


def worst(*args, ranks: int, transport: str = "mpi4py", **kwargs) -> float:
    results = run_ranks(cases.compare, ranks, transport, args=args, kwargs=kwargs, deadline=100)
    return max(value for result in results for value in result)


@pytest.mark.parametrize(
    ("plan", "ranks", "batches"),
    [
        ("data=1 micro_batches=3", 1, ((4, 10),)),
        ("data=2", 2, ((4, 10), (5, 10), (1, 10))),
        ("stages=2 micro_batches=4", 2, ((8, 10), (3, 10), (5, 12))),
        ("data=2 stages=2 micro_batches=4", 4, ((8, 10), (3, 10), (13, 12))),
        ("filter=2 data=2", 4, ((2, 10), (1, 13))),
        ("spatial=2x1", 2, ((2, 10), (3, 13))),
    ],
)
def test_uneven_batches_and_changing_sizes_equal_one_device(plan, ranks, batches):
    assert worst(cases.classifier, cases.images, plan, batches, F.cross_entropy, ranks=ranks) < BOUND


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ("stages=2 schedule=gems-mast", 2),
        ("stages=2 schedule=gems-master replication=2", 2),
        ("stages=4 schedule=gems-master replication=2", 4),
        ("stages=2 schedule=bidirectional micro_batches=4", 2),
        ("stages=2 schedule=bidirectional micro_batches=3", 2),
        ("stages=4 schedule=zero-bubble micro_batches=5", 4),
        ("stages=2 filter=2 schedule=gems-mast", 4),
        pytest.param("stages=3 filter=2 schedule=gems-mast", 6, marks=pytest.mark.full),
        ("stages=2x1|1|1 schedule=gems-mast", 4),
    ],
)
def test_statistics_and_weights_of_two_directions_equal_one_device(plan, ranks):
    batches = ((8, 10), (3, 11))
    assert worst(cases.classifier, cases.images, plan, batches, F.cross_entropy, ranks=ranks) < BOUND


def test_groups_that_would_straddle_nodes_are_packed_and_equal_one_device():
    found = run_ranks(workers.packed_on_nodes, 6, args=("data=2 stages=2x1|1", 4))
    # The tiles of both replicas come first, so that each pair shares a node of four ranks.
    assert [place for place, _, _ in found] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]
    assert max(cases.worst(*errors) for _, *errors in found) < BOUND


@pytest.mark.parametrize("transport", ["mpi4py", "gloo"])
def test_gradients_summed_early_on_one_rank_and_late_on_another_stay_apart_from_batch_norms(transport):
    for started, gradients in run_ranks(workers.summed_at_other_times, 2, transport, deadline=60):
        assert gradients < BOUND
        assert started[0] != started[1]


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ("data=2", 2),
        ("data=2 spatial=2x1", 4),
        ("stages=2 micro_batches=4", 2),
        ("stages=2 schedule=gems-mast", 2),
    ],
)
@pytest.mark.parametrize("loss", [cases.counted_loss, cases.Weighted()], ids=["ignored", "weighted"])
def test_losses_divide_by_what_counts_in_the_whole_mini_batch(plan, ranks, loss):
    assert worst(cases.segmenter, cases.masks, plan, ((4, 10), (3, 9)), loss, ranks=ranks) < BOUND


@pytest.mark.parametrize(("plan", "ranks"), [("data=2", 2), ("data=2 spatial=2x1", 4)])
@pytest.mark.parametrize("loss", [cases.batch_dice, cases.dice_and_entropy])
def test_a_ratio_of_sums_is_that_of_all_replicas(plan, ranks, loss):
    batches = ((4, 10), (3, 9), (1, 9))
    assert worst(cases.segmenter, cases.masks, plan, batches, loss, ranks=ranks) < BOUND


def test_a_ratio_of_sums_may_scatter_its_targets():
    args = (cases.segmenter, cases.masks, "data=2", ((4, 10), (3, 9)), cases.scattered_dice)
    assert worst(*args, ranks=2) < BOUND


def test_a_ratio_of_sums_of_each_micro_batch_is_that_of_all_its_replicas():
    plan, batches = "data=2 stages=2 micro_batches=2", ((4, 10), (3, 9))
    args = (cases.segmenter, cases.masks, plan, batches, cases.batch_dice, {"loss_mean": "micro-batch"})
    assert worst(*args, ranks=4) < BOUND


@pytest.mark.parametrize(("plan", "ranks"), [("data=2", 2), ("stages=4 micro_batches=2", 4)])
def test_several_inputs_and_outputs_and_whole_numbers_between_stages(plan, ranks):
    args = (cases.two_heads, cases.paired, plan, ((4, 10), (3, 10)), cases.two_losses)
    assert worst(*args, ranks=ranks) < BOUND


@pytest.mark.parametrize("schedule", ["1f1b micro_batches=2", "gems-mast"])
def test_weights_that_stages_share_and_frozen_ones(schedule):
    plan = f"stages=2 cuts=middle schedule={schedule}"
    assert worst(cases.tied, cases.images, plan, ((4, 10),) * 2, F.cross_entropy, ranks=2) < BOUND


def test_a_model_that_cannot_be_captured_still_has_replicas():
    batches = ((4, 10), (3, 10), (1, 12))
    args = (cases.undecided, cases.paired, "data=2", batches, cases.two_losses)
    assert worst(*args, ranks=2) < BOUND


def test_the_same_over_gloo():
    plan = "stages=2 schedule=gems-mast"
    batches = ((4, 10), (3, 11))
    args = (cases.classifier, cases.images, plan, batches, F.cross_entropy)
    assert worst(*args, ranks=2, transport="gloo") < BOUND


@pytest.mark.parametrize("plan", ["spatial=2x1", "stages=2 micro_batches=2"])
def test_programs_are_lowered_once_for_each_size_and_kind_of_pass(plan):
    for train, again, predict, once_more in run_ranks(workers.lowerings, 2, args=(plan,)):
        assert train >= 1  # the example's were lowered before
        assert predict >= 2
        assert (again, once_more) == (0, 0)
