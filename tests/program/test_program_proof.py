from __future__ import annotations

import dataclasses
import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hand_graphs import with_skips
from shardwise.plan import Edge, Mesh, Plan, Split, Way, stage_edges
from shardwise.plan.plan import SCHEDULES
from shardwise.program.actions import Act, Action, Direction, Program
from shardwise.program.build import build
from shardwise.program.validate import ProgramError, prove

EDGES = [Edge("a", 0, 1), Edge("b", 1, 2), Edge("a", 0, 2), Edge("n", 0, 2, False)]


@st.composite
def programs(draw) -> Program:
    schedule = draw(st.sampled_from(SCHEDULES))
    widths = draw(st.lists(st.sampled_from([1, 1, 2, 3, 4]), min_size=1, max_size=5))
    micro_batches = 1 if schedule == "layer" else draw(st.integers(1, 5))
    if schedule == "bidirectional":
        micro_batches = max(micro_batches, 2)
    plan = Plan(
        stages=tuple(Split(Way.BATCH, (w,)) for w in widths),
        schedule=schedule,
        micro_batches=micro_batches,
        replication=draw(st.integers(1, 3)) if schedule == "gems-master" else 1,
    )
    # Hypothesis shrinks the plan; the network behind it comes from one seed, which is cheaper to draw.
    seed = draw(st.integers(0, 10**6))
    chance = random.Random(seed)
    layers = chance.randint(len(widths), 12)
    graph = with_skips(layers, chance.randint(0, 8), seed)
    cuts = sorted(chance.sample(range(2, layers + 1), len(widths) - 1))
    return build(plan, stage_edges(graph, cuts), training=chance.random() > 0.1)


@settings(max_examples=2000, deadline=None)
@given(programs())
def test_every_generated_program_is_proven(program):
    assert sum(map(len, program.actions)) >= program.ranks * program.micro_batches
    prove(program)


def by_pair(program: Program, with_kind: bool) -> tuple[dict, dict]:
    """Return what is sent and what is received between each pair of ranks, values and gradients apart."""
    mesh = Mesh(1, program.widths, program.bidirectional)
    sent, received = defaultdict(list), defaultdict(list)
    for rank, actions in enumerate(program.actions):
        for action in (a for a in actions if a.edge is not None):
            back = action.act in (Act.SEND_GRAD, Act.RECEIVE_GRAD)
            other = action.edge.target if action.stage == action.edge.source else action.edge.source
            for peer in mesh.member_positions(other, action.direction):
                message, kind = (action.edge, action.micro_batch, back), back and with_kind
                if action.act in (Act.SEND, Act.SEND_GRAD):
                    sent[rank, peer, kind].append(message)
                else:
                    received[peer, rank, kind].append(message)
    return sent, received


@settings(max_examples=60, deadline=None)
@given(programs())
def test_between_two_ranks_values_keep_their_order_and_so_do_gradients(program):
    sent, received = by_pair(program, with_kind=True)
    assert sent == received


def test_between_two_ranks_messages_keep_their_order_unless_both_directions_mix():
    edges = [Edge(f"v{a}{b}", a, b) for a in range(4) for b in range(a + 1, 4)]
    for line in ("gpipe", "1f1b", "zero-bubble", "gems-mast", "gems-master replication=3"):
        program = build(Plan.parse(f"stages=2|1|3|1 schedule={line} micro_batches=4"), edges)
        sent, received = by_pair(program, with_kind=False)
        assert sent == received
        assert sent
    mixed = build(Plan.parse("stages=4 schedule=bidirectional micro_batches=8"), edges)
    sent, received = by_pair(mixed, with_kind=False)
    assert sent != received


def test_a_message_that_would_overtake_another_of_its_channel_is_refused():
    program = build(Plan.parse("stages=2 schedule=gpipe micro_batches=2"), EDGES[:1])
    receives = [a for a in program.actions[1] if a.act is Act.RECEIVE]
    others = [a for a in program.actions[1] if a.act is not Act.RECEIVE]
    words = r"rank 0, send S0\.0↓\(a\[0→1\]\): rank 1 expects R1\.1↓\(a\[0→1\]\) at this place"
    with pytest.raises(ProgramError, match=words):
        prove(changed(program, 1, [*reversed(receives), *others]))


def changed(program: Program, rank: int, actions: list[Action]) -> Program:
    lists = list(program.actions)
    lists[rank] = tuple(actions)
    return dataclasses.replace(program, actions=tuple(lists))


@settings(max_examples=150, deadline=None)
@given(programs(), st.data())
def test_a_program_with_any_action_dropped_is_refused(program, data):
    rank = data.draw(st.integers(0, program.ranks - 1))
    actions = list(program.actions[rank])
    del actions[data.draw(st.integers(0, len(actions) - 1))]
    with pytest.raises(ProgramError, match="rank"):
        prove(changed(program, rank, actions))


@settings(max_examples=150, deadline=None)
@given(programs(), st.data())
def test_a_program_with_any_action_doubled_is_refused(program, data):
    rank = data.draw(st.integers(0, program.ranks - 1))
    actions = list(program.actions[rank])
    i = data.draw(st.integers(0, len(actions) - 1))
    j = data.draw(st.integers(i, len(actions)))
    with pytest.raises(ProgramError, match="rank"):
        prove(changed(program, rank, [*actions[:j], actions[i], *actions[j:]]))


def base(line: str = "stages=3 schedule=1f1b micro_batches=2") -> Program:
    return build(Plan.parse(line), EDGES)


def without(program: Program, rank: int, act: Act, **where: object) -> Program:
    """Drop the first action of a kind from a rank's list."""
    actions = list(program.actions[rank])
    actions.remove(find(program, rank, act, **where))
    return changed(program, rank, actions)


def find(program: Program, rank: int, act: Act, **where: object) -> Action:
    return next(
        a
        for a in program.actions[rank]
        if a.act is act and all(getattr(a, name) == value for name, value in where.items())
    )


def swapped(program: Program, rank: int, first: Action, second: Action) -> Program:
    actions = list(program.actions[rank])
    i, j = actions.index(first), actions.index(second)
    actions[i], actions[j] = actions[j], actions[i]
    return changed(program, rank, actions)


@pytest.mark.parametrize(
    ("rank", "act", "words"),
    [
        (0, Act.SEND, r"rank 0, send S0\.0↓\(a\[0→1\]\): missing, although F0\.0↓"),
        (1, Act.RECEIVE, r"rank 1, forward F1\.0↓: needs receive R1\.0↓\(a\[0→1\]\)"),
        (0, Act.RECEIVE_GRAD, r"rank 0, backward B0\.0↓: needs receive gradient r0\.0↓\(a\[0→1\]\)"),
        (2, Act.SEND_GRAD, r"rank 2, send gradient s2\.0↓\(a\[0→2\]\): missing, although B2\.0↓"),
        (1, Act.FORWARD, r"rank 1, send S1\.0↓\(b\[1→2\]\): needs forward F1\.0↓"),
        (0, Act.BACKWARD, r"rank 0, backward B0\.0↓: missing, although F0\.0↓"),
        (2, Act.REDUCE, r"rank 2, reduce REDUCE2: missing"),
        (2, Act.STEP, r"rank 2, step STEP: missing"),
    ],
)
def test_a_dropped_action_is_named(rank, act, words):
    with pytest.raises(ProgramError, match=words) as caught:
        prove(without(base(), rank, act))
    assert caught.value.rank == rank


def test_a_message_without_its_other_end_names_the_peer():
    program = build(Plan.parse("stages=3 schedule=gpipe micro_batches=2"), EDGES[1:2])
    with pytest.raises(
        ProgramError, match=r"rank 1, send S1\.1↓\(b\[1→2\]\): rank 2 has no receive R2\.1↓"
    ) as caught:
        prove(changed(program, 2, [a for a in program.actions[2] if a.micro_batch != 1]))
    assert (caught.value.rank, caught.value.peer) == (1, 2)


def test_a_backward_before_its_forward_is_refused():
    program = base()
    forward, backward = find(program, 2, Act.FORWARD), find(program, 2, Act.BACKWARD)
    with pytest.raises(ProgramError, match=r"rank 2, backward B2\.0↓: needs forward F2\.0↓"):
        prove(swapped(program, 2, forward, backward))


def test_a_sum_before_the_last_backward_is_refused():
    program = base()
    late = find(program, 1, Act.BACKWARD, micro_batch=1)
    with pytest.raises(ProgramError, match=r"REDUCE1: needs backward B1\.1↓"):
        prove(swapped(program, 1, find(program, 1, Act.REDUCE), late))


def test_two_stages_that_wait_for_each_other_are_a_deadlock_with_names():
    program = build(Plan.parse("stages=2 schedule=gpipe micro_batches=2"), EDGES[:1])
    # The first stage wants the gradient of micro-batch 0 before it sends micro-batch 1; the second stage
    # wants micro-batch 1 before its first backward.
    first = [str(a) for a in program.actions[0]]
    order = ["F0.0↓", "S0.0↓(a[0→1])", "r0.0↓(a[0→1])", "B0.0↓", "F0.1↓", "S0.1↓(a[0→1])"]
    order += ["r0.1↓(a[0→1])", "B0.1↓", "REDUCE0", "STEP"]
    assert sorted(order) == sorted(first)
    by_name = dict(zip(first, program.actions[0], strict=True))
    with pytest.raises(ProgramError, match="a circle of waiting") as caught:
        prove(changed(program, 0, [by_name[name] for name in order]))
    assert {caught.value.rank, caught.value.peer} == {0, 1}
    assert caught.value.action is not None
    assert caught.value.action.act in (Act.RECEIVE, Act.RECEIVE_GRAD)


def test_ranks_of_a_group_that_compute_in_other_orders_are_refused():
    program = build(Plan.parse("spatial=2 schedule=gpipe micro_batches=2"))
    first, second = find(program, 1, Act.FORWARD), find(program, 1, Act.FORWARD, micro_batch=1)
    words = r"rank 1, forward F0\.1↓: computes F0\.1↓ where its group computes F0\.0↓ \(peer: rank 0\)"
    with pytest.raises(ProgramError, match=words):
        prove(swapped(program, 1, first, second))


def test_two_groups_that_meet_in_opposite_orders_are_a_deadlock():
    program = build(Plan.parse("spatial=2 schedule=gems-mast"))
    up = [a for a in program.actions[1] if a.direction is Direction.UP and a.micro_batch == 1]
    down = [a for a in program.actions[1] if a.direction is Direction.DOWN and a.micro_batch == 0]
    with pytest.raises(ProgramError, match=r"circle of waiting: rank 0 at F0\.0↓, rank 1 at F0\.1↑"):
        prove(changed(program, 1, [*up, *down, Action(Act.REDUCE, 0), Action(Act.STEP)]))


def test_sums_in_opposite_orders_are_refused():
    program = build(Plan.parse("stages=2 schedule=gems-mast"), EDGES[:1])
    wrong = swapped(program, 0, Action(Act.REDUCE, 1), Action(Act.REDUCE, 0))
    with pytest.raises(ProgramError, match="reduced before stage") as caught:
        prove(wrong)
    assert {caught.value.rank, caught.value.peer} == {0, 1}


def test_a_micro_batch_that_nobody_computes_is_missed():
    program = dataclasses.replace(build(Plan.parse("schedule=gpipe micro_batches=2")), micro_batches=3)
    with pytest.raises(ProgramError, match=r"F0\.2↓: missing"):
        prove(program)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (Action(Act.FORWARD, 1, 0), "does not play stage 1 down"),
        (Action(Act.FORWARD, 0, 0, Direction.UP), "does not play stage 0 up"),
        (Action(Act.FORWARD, 0, 7), "only 2 micro-batches"),
        (Action(Act.SEND, 0, 0, Direction.DOWN, Edge("z", 0, 1)), "no edge z"),
        (Action(Act.RECEIVE, 0, 0, Direction.DOWN, EDGES[0]), "not stage 1 of its edge"),
        (Action(Act.RECEIVE_GRAD, 0, 0, Direction.DOWN, EDGES[3]), "not differentiable"),
        (Action(Act.REDUCE, 2), "no backward of stage 2"),
    ],
)
def test_what_is_not_a_ranks_business_is_refused(action, words):
    program = base()
    with pytest.raises(ProgramError, match=words):
        prove(changed(program, 0, [action, *program.actions[0]]))


def test_training_has_no_place_in_inference():
    program = dataclasses.replace(base(), training=False)
    with pytest.raises(ProgramError, match="without training"):
        prove(program)


def test_missing_lists_are_counted():
    with pytest.raises(ProgramError, match="2 lists for 3 ranks"):
        prove(dataclasses.replace(base(), actions=base().actions[:2]))


def test_actions_after_the_step_are_refused():
    program = base()
    with pytest.raises(ProgramError, match="after the step"):
        prove(changed(program, 0, [Action(Act.STEP), *program.actions[0][:-1]]))
