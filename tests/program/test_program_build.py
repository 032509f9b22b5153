from __future__ import annotations

from shardwise.plan import Edge, Plan
from shardwise.program.actions import Act, Action, Direction
from shardwise.program.build import build

SKIP, NEXT, LAST, LABELS = Edge("a", 0, 2), Edge("a", 0, 1), Edge("b", 1, 2), Edge("n", 0, 2, False)


def words(actions):
    return [str(action) for action in actions]


def test_messages_surround_the_computations_and_skips_go_directly():
    program = build(Plan.parse("stages=3 schedule=layer"), [SKIP, LABELS, NEXT, LAST])
    assert words(program.actions[0]) == [
        "F0.0↓",
        "S0.0↓(a[0→1])",
        "S0.0↓(a[0→2])",
        "S0.0↓(n[0→2])",
        "r0.0↓(a[0→1])",
        "r0.0↓(a[0→2])",
        "B0.0↓",
        "REDUCE0",
        "STEP",
    ]
    assert words(program.actions[2]) == [
        "R2.0↓(a[0→2])",
        "R2.0↓(n[0→2])",
        "R2.0↓(b[1→2])",
        "F2.0↓",
        "B2.0↓",
        "s2.0↓(a[0→2])",
        "s2.0↓(b[1→2])",
        "REDUCE2",
        "STEP",
    ]


def test_gradients_leave_before_the_weights_part():
    program = build(Plan.parse("stages=2 schedule=zero-bubble"), [NEXT])
    expected = "R1.0↓(a[0→1]) F1.0↓ B1.0↓ s1.0↓(a[0→1]) W1.0↓ REDUCE1 STEP"
    assert " ".join(words(program.actions[1])) == expected


def test_a_stage_that_a_rank_holds_twice_is_reduced_once_after_both_directions():
    program = build(Plan.parse("stages=3 schedule=bidirectional micro_batches=4"))
    middle = program.actions[1]
    assert middle.count(Action(Act.REDUCE, 1)) == 1
    last = max(i for i, a in enumerate(middle) if a.act is Act.BACKWARD)
    assert middle.index(Action(Act.REDUCE, 1)) == last + 1
    assert {a.direction for a in middle if a.act is Act.FORWARD} == set(Direction)


def test_all_ranks_reduce_in_one_order():
    program = build(Plan.parse("stages=2x2|1|1 schedule=bidirectional micro_batches=6"))
    for actions in program.actions:
        stages = [a.stage for a in actions if a.act is Act.REDUCE]
        assert stages == sorted(stages, reverse=True)


def test_a_program_prints_its_computations():
    program = build(Plan.parse("stages=2 schedule=1f1b micro_batches=2"), [NEXT])
    assert str(program).splitlines()[0] == "rank 0: F0.0↓ F0.1↓ B0.0↓ B0.1↓ REDUCE0 STEP"
