"""Clipping, accumulation, overlap, prediction, files, local data, models without data, losses refused."""

from __future__ import annotations

import fit_workers as workers
import pytest
import torch

from ranks import run_ranks
from shardwise.runtime.poller import cores

BOUND = 1e-10


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ("data=2", 2),
        ("filter=2", 2),
        pytest.param("stages=3 filter=2 schedule=gems-mast", 6, marks=pytest.mark.full),
    ],
)
def test_clipping_counts_every_slice_once(plan, ranks):
    for weights, norms, norm in run_ranks(workers.clipped, ranks, args=(plan,)):
        assert norm > 0.05
        assert max(weights, norms) < BOUND


@pytest.mark.parametrize(("plan", "ranks"), [("data=1", 1), ("data=2", 2), ("stages=2 micro_batches=2", 2)])
def test_accumulation_updates_with_the_last_step_only(plan, ranks):
    for before, after in run_ranks(workers.accumulated, ranks, args=(plan,)):
        assert before == 0.0
        assert after < BOUND


@pytest.mark.parametrize(("plan", "ranks"), [("data=1", 1), ("stages=2", 2)])
def test_what_an_epoch_leaves_over_makes_an_update_of_its_own(plan, ranks):
    for error, updates in run_ranks(workers.accumulated_over_epochs, ranks, args=(plan,)):
        assert error < BOUND
        assert updates == 6


@pytest.mark.parametrize("plan", ["data=2", "stages=2 schedule=gems-master replication=2"])
def test_reduction_starts_before_the_last_backward_ends(plan):
    early, total = zip(*run_ranks(workers.overlapped, 2, args=(plan,)), strict=True)
    assert min(total) > 2
    assert min(early) >= 2


def test_threads_that_add_gradients_up_wait_for_free_cores():
    early, total = zip(*run_ranks(workers.overlapped, 2, "gloo", args=("data=2",)), strict=True)
    assert min(total) > 2
    assert max(early) == 0 if cores() <= 2 else min(early) >= 2


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ("data=1", 1),
        ("data=2", 2),
        ("spatial=2x1", 2),
        ("stages=4 micro_batches=2", 4),
        ("stages=2 schedule=gems-mast", 2),
    ],
)
def test_predictions_and_evaluation_equal_one_device_for_any_batch(plan, ranks):
    for error in run_ranks(workers.predicted, ranks, args=(plan, (1, 5, 4))):
        assert error < BOUND


@pytest.mark.parametrize(("plan", "ranks"), [("data=1", 1), ("data=2 filter=2", 4)])
def test_training_goes_on_from_a_saved_state(plan, ranks, tmp_path):
    for error in run_ranks(workers.saved, ranks, args=(plan, str(tmp_path / "state"))):
        assert error == 0.0


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("plan", ["stages=2", "stages=2 schedule=gems-mast"])
def test_the_state_of_adam_is_saved_at_any_time(plan, steps, tmp_path):
    for error in run_ranks(workers.saved, 2, args=(plan, str(tmp_path / "state"), "adam", steps)):
        assert error == 0.0


def test_a_state_saved_before_the_first_step_starts_without_momentum(tmp_path):
    for error in run_ranks(workers.saved, 2, args=("data=2", str(tmp_path / "state"), "sgd", 0)):
        assert error == 0.0


def test_a_state_of_another_optimizer_is_refused(tmp_path):
    for text in run_ranks(workers.loaded_with_another_optimizer, 2, args=(str(tmp_path / "state"),)):
        assert "exp_avg" in text
        assert "momentum_buffer" in text


def test_a_state_of_another_plan_is_refused(tmp_path):
    for text in run_ranks(workers.loaded_under_another_plan, 2, args=(str(tmp_path / "state"),)):
        assert "data=2" in text
        assert "spatial=2x1" in text


@pytest.mark.parametrize(("plan", "ranks"), [("data=2", 2), ("spatial=2x1 data=2", 4), ("stages=4", 4)])
def test_a_rank_is_given_only_what_it_needs(plan, ranks):
    results = run_ranks(workers.local_steps, ranks, args=(plan,))
    assert max(error for error, _, _ in results) < BOUND
    assert min(given for _, given, _ in results) <= results[0][2] // 2


def test_each_of_four_stages_has_its_share_of_a_model_without_data():
    results = run_ranks(workers.materialised, 4, args=("stages=4 micro_batches=2",))
    alone = workers.materialised_alone()
    shares = [share for share, *_ in results]
    assert max(shares) <= 0.35
    streamed = results[0][2]
    assert streamed.keys() == alone.keys()
    assert all(torch.equal(streamed[name], alone[name]) for name in alone)
    assert all(not result[2] for result in results[1:])
    assert len({round(loss, 12) for _, loss, _, _ in results}) == 1
    assert results[0][3] < results[0][1]


def test_slices_start_from_the_same_values_as_stages():
    sliced = run_ranks(workers.materialised, 2, args=("filter=2",))
    alone = workers.materialised_alone()
    assert all(torch.equal(sliced[0][2][name], alone[name]) for name in alone)


def test_a_loss_over_the_whole_mini_batch_is_refused_with_micro_batches_only():
    found = run_ranks(workers.refused, 2, args=("data=2 micro_batches=2", "exact"))
    assert all("no mean over samples" in text and "one micro-batch" in text for text in found)
    assert run_ranks(workers.refused, 2, args=("data=2 micro_batches=2", "micro-batch")) == ["", ""]
    assert run_ranks(workers.refused, 2, args=("data=2", "exact")) == ["", ""]
    assert run_ranks(workers.refused, 2, args=("spatial=2x1", "exact")) == ["", ""]


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [("micro_batches=4 batch_norm=deferred", 1), ("stages=2 schedule=gems-mast batch_norm=deferred", 2)],
)
def test_deferred_statistics_are_those_of_the_whole_mini_batch(plan, ranks):
    for error, count in run_ranks(workers.deferred, ranks, args=(plan,)):
        assert error < BOUND
        assert count == 1


def test_a_model_that_cannot_be_captured_is_refused_everything_but_replicas():
    for found in run_ranks(workers.uncaptured, 2):
        assert "values of a tensor" in found["spatial=2x1"]
        assert "nearest plan that works: data=2" in found["spatial=2x1"]
        assert "nearest plan that works: data=2" in found["stages=2"]
        assert "batch_norm=local" in found["data=2"]
        assert found["data=2 batch_norm=local"] == ""
        assert found["auto"] == "data=2 batch_norm=local"
        assert "Only data parallelism" in found["note"]
        assert found["statistics"] == 0.0
        assert found["predicted"] < BOUND


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ("data=2 batch_norm=local", 2),
        ("data=2 stages=2 micro_batches=2 batch_norm=local", 4),
        ("data=2 stages=2 schedule=gems-mast batch_norm=local", 4),
    ],
)
def test_local_batch_norm_is_that_of_replicas_alone_with_the_statistics_of_the_first(plan, ranks):
    for errors in run_ranks(workers.local_norm, ranks, args=(plan,)):
        assert max(errors) < BOUND


def test_local_batch_norm_is_that_of_each_tile():
    for errors in run_ranks(workers.local_norm_of_tiles, 2):
        assert max(errors) < BOUND


def test_stages_keep_within_the_memory_of_ranks():
    """The ranks have different shares of their nodes; all cut for the smallest."""
    (free, _), *_ = run_ranks(workers.cut_within, 2, args=(1e12, 1e12))
    for cuts, notes in run_ranks(workers.cut_within, 2, args=(None, 1.9e6)):
        assert cuts < free
        assert not notes
    for cuts, notes in run_ranks(workers.cut_within, 2, args=(None, 1e4)):
        assert cuts == free
        assert "balanced by time alone" in notes[0]
    for refusal, _ in run_ranks(workers.cut_within, 2, args=(1e4, 1e12)):
        assert "alone needs" in refusal


def test_fit_keeps_within_the_memory_it_is_given():
    assert run_ranks(workers.fitted_within, 2, args=(1e12,)) == ["", ""]
    assert all("alone needs" in refusal for refusal in run_ranks(workers.fitted_within, 2, args=(1e3,)))
