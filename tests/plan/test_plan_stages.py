from __future__ import annotations

import bisect

from hypothesis import given, settings
from hypothesis import strategies as st

from hand_graphs import IMAGE, chain, graph, layer, with_skips
from shardwise.graph import TensorSpec
from shardwise.plan import Edge, shared_parameters, stage_edges, stage_layers


def test_a_value_goes_directly_to_every_stage_that_reads_it():
    net = graph(
        [layer("a", ["x"], ["w"]), layer("b", ["a"]), layer("c", ["b", "a"]), layer("d", ["c", "a", "x"])]
    )
    edges = stage_edges(net, (2, 3, 4))
    assert edges == (Edge("a", 0, 1), Edge("a", 0, 2), Edge("a", 0, 3), Edge("b", 1, 2), Edge("c", 2, 3))


def test_inputs_belong_to_no_stage():
    net = graph([layer("a", ["x"]), layer("b", ["a", "x"])])
    assert [[each.name for each in part] for part in stage_layers(net, (2,))] == [["a"], ["b"]]
    assert [edge.value for edge in stage_edges(net, (2,))] == ["a"]


def test_values_of_frozen_layers_send_no_gradients():
    net = graph([layer("a", ["x"], ["w"]), layer("b", ["a"], ["v"]), layer("c", ["b"])], frozen=["w"])
    assert stage_edges(net, (2, 3)) == (Edge("a", 0, 1, False), Edge("b", 1, 2, True))


def test_integers_have_no_gradients_on_either_side():
    labels = TensorSpec((4,), "int64")
    net = graph(
        [
            layer("a", ["x"], ["w"]),
            layer("top", ["a"], spec=labels),
            layer("b", ["a"]),
            layer("c", ["b", "top"]),
        ]
    )
    kinds = {(e.value, e.target): e.differentiable for e in stage_edges(net, (2, 3, 4))}
    # What flows into the integers gets nothing back; the other reader of the same value does.
    assert kinds == {("a", 1): False, ("a", 2): True, ("top", 3): False, ("b", 3): True}


def test_what_no_target_needs_is_not_sent():
    net = graph([layer("a", ["x"]), layer("b", ["a"]), layer("aux", ["b", "a"])], outputs=["b"])
    assert [edge.value for edge in stage_edges(net, (2, 3))] == ["a"]
    assert [str(edge) for edge in stage_edges(net, (2, 3), ["aux"])] == ["a[0→1]", "a[0→2]", "b[1→2]"]


def test_shared_weights_are_reported_with_their_stages():
    net = graph([layer("a", ["x"], ["w", "v"]), layer("b", ["a"], ["v"]), layer("c", ["b"], ["w"])])
    assert shared_parameters(net, (2, 3)) == {"w": (0, 2), "v": (0, 1)}
    assert shared_parameters(chain(4), (2, 3)) == {}


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 12), st.integers(0, 10), st.integers(0, 10**6), st.data())
def test_edges_are_exactly_the_reads_across_cuts(n, skips, seed, data):
    net = with_skips(n, skips, seed)
    cuts = tuple(sorted(data.draw(st.sets(st.integers(2, n), max_size=4))))
    stage = {name: bisect.bisect_right(cuts, i) for name, i in net.index.items()}
    alive = {net.layers[-1].name}
    for each in reversed(net.layers):
        alive |= set(each.inputs) if each.name in alive else set()
    expected = {
        (source, stage[source], stage[each.name])
        for each in net.layers
        if each.name in alive
        for source in each.inputs
        if source != "x" and stage[source] != stage[each.name]
    }
    found = stage_edges(net, cuts)
    assert {(e.value, e.source, e.target) for e in found} == expected
    assert len(found) == len(expected)
    assert all(e.source < e.target for e in found)
    assert all(net[e.value].spec == IMAGE for e in found if e.differentiable)
