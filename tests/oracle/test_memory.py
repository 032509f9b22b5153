"""Peak memory by category, counted by hand on a small network."""

import pytest
import torch
from oracle_cases import Fixed, machine, small_graph, stage

from shardwise import zoo
from shardwise.graph import capture
from shardwise.oracle import predict
from shardwise.oracle.memory import footprint, stage_memory
from shardwise.plan import Split
from shardwise.program import lower_stage
from shardwise.runtime.memory import measure_peak

VALUE = 4 * 8 * 16 * 16 * 4
INPUT = 4 * 3 * 16 * 16 * 4
PARAMETERS = (8 * 3 * 9 + 8 + 8 + 8 * 8 * 9 + 8) * 4
BUFFERS = (8 + 8) * 4 + 8


def test_stored_tensors_are_counted_once_each():
    memory = stage_memory(stage("data=1"), 0, optimizer_slots=2.0, baseline_bytes=100)
    assert memory["weights"] == PARAMETERS + BUFFERS
    assert memory["optimizer"] == 2 * PARAMETERS
    assert memory["baseline"] == 100
    assert memory["buffers"] == 0


def test_activations_hold_what_backward_needs_and_the_fullest_moment():
    memory = stage_memory(stage("data=1"), 0)
    # Kept: the input, both inputs of batch norm and of the last convolution (the output of ReLU); at the
    # fullest moment the output, or a gradient of the same size, comes on top, and a second one beside it.
    kept = INPUT + 2 * VALUE
    assert kept + VALUE <= memory["activations"] <= kept + 2 * VALUE + 1024


def test_tiles_halve_the_activations_but_not_the_weights():
    whole, half = (stage_memory(stage(text), 0) for text in ("data=1", "spatial=2x1"))
    assert half["weights"] == whole["weights"]
    # The convolution keeps the copy of its input with a halo of one row; what ReLU keeps of it moves there.
    with_halo = 4 * 8 * 9 * 16 * 4
    assert 0 < half["activations"] - whole["activations"] / 2 < with_halo
    # What leaves and what arrives; backward has them the other way round, in the same memory.
    assert half["buffers"] == 2 * (4 * 8 * 1 * 16 * 4)


def test_filters_halve_the_weights():
    memory = stage_memory(stage("filter=2"), 0)
    assert memory["optimizer"] == pytest.approx(PARAMETERS / 2, rel=0.05)


def test_gradients_grow_during_backward_and_are_whole_where_earlier_micro_batches_left_them():
    once = stage_memory(stage("data=1"), 0)
    later = stage_memory(stage("data=1"), 0, in_flight=2)
    assert once["gradients"] < PARAMETERS
    assert later["gradients"] == PARAMETERS


def test_a_later_micro_batch_makes_a_gradient_before_it_adds_it():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 512))
    graph = capture(model, torch.zeros(1, 3, 16, 16), check=False)
    program = lower_stage(graph, graph.layers, Split(), departures=graph.output_names)
    size = footprint(program, 0)
    weight = 4 * 512 * 3 * 16 * 16
    assert sum(size.first_backward) < 1.5 * weight
    assert 2 * weight <= sum(size.later_backward) < 2.5 * weight


def test_sums_over_ranks_need_a_flat_copy_of_the_gradients():
    memory = stage_memory(stage("data=1"), 0, reduced=True)
    assert memory["buffers"] == PARAMETERS


def test_more_micro_batches_in_flight_keep_more_activations():
    one, three = (stage_memory(stage("data=1"), 0, in_flight=n)["activations"] for n in (1, 3))
    assert three - one == pytest.approx(2 * (INPUT + 2 * VALUE), rel=0.01)


@pytest.mark.parametrize(
    ("name", "shape"), [("resnet50", (4, 3, 64, 64)), ("unet", (1, 3, 64, 64)), ("resnet20", (8, 3, 32, 32))]
)
def test_one_rank_needs_what_torch_is_seen_to_allocate(name, shape):
    torch.set_num_threads(1)
    model, x = zoo.build(name), torch.zeros(shape)
    graph = capture(model, x, check=False)
    program = lower_stage(graph, graph.layers, Split(), departures=graph.output_names)
    memory = stage_memory(program, 0)
    model(x).sum().backward()
    model.zero_grad()
    seen = measure_peak(lambda: model(x).sum().backward()).bytes
    predicted = memory["activations"] + memory["gradients"] - x.nbytes
    assert predicted == pytest.approx(seen, rel=0.1)


@pytest.mark.parametrize(("factor", "verdict"), [(2.0, "fits"), (1.05, "tight"), (0.9, "does not fit")])
def test_the_verdict_compares_with_the_memory_of_the_device(factor, verdict):
    p = predict(small_graph(), "data=1", machine(), kernels=Fixed())
    device = machine().device
    sized = type(device)("sized", device.peak_flops, factor * p.peak_bytes, 1e30)
    again = predict(small_graph(), "data=1", machine(device=sized), kernels=Fixed())
    assert again.verdict == verdict
    assert again.peak_bytes == p.peak_bytes
