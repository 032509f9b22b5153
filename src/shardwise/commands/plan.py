"""`shardwise plan`: rank all plans of a network on a machine."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.commands.subject import build_model, parse_bytes, sample_shape, training_graph
from shardwise.commands.waiting import Waiting

if TYPE_CHECKING:
    from shardwise.graph import Graph
    from shardwise.machine import Machine
    from shardwise.oracle.questions import Answer
    from shardwise.oracle.search import Refused


def command(
    model: Annotated[str, typer.Argument(help="A zoo name, or module:attribute.")],
    ranks: Annotated[
        str, typer.Option(help="How many ranks there are; commas rank several numbers together.")
    ] = "1",
    machine: Annotated[str, typer.Option(help="A preset's name or a TOML file.")] = "here.toml",
    batch: Annotated[int, typer.Option(help="Samples of the global mini-batch.")] = 32,
    sample: Annotated[str | None, typer.Option("--input", help="One sample, e.g. 3x1024x1024.")] = None,
    memory: Annotated[str | None, typer.Option(help="Limit per rank, e.g. 16GB.")] = None,
    objective: Annotated[str, typer.Option(help="time, memory or cost.")] = "time",
    keep: Annotated[int, typer.Option(help="How many plans to show.")] = 10,
    slots: Annotated[float, typer.Option(help="Copies of the weights that the optimizer keeps.")] = 1.0,
    find: Annotated[
        str | None, typer.Option(help="What else is asked for: fewest-ranks, largest-batch or largest-image.")
    ] = None,
    profile_seconds: Annotated[
        float, typer.Option(help="Measure unseen layer shapes on this machine for at most so long.")
    ] = 0.0,
    front: Annotated[
        bool, typer.Option(help="Look for all plans that none beats in time, memory and ranks, too.")
    ] = False,
    quick: Annotated[
        bool, typer.Option(help="On up to 8 ranks, do not simulate every plan that may be best.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Rank every way to split a network's training, best first, with reasons for the refused ones."""
    from shardwise.ask import search
    from shardwise.machine import Machine
    from shardwise.oracle.search import NoPlanError

    where = Machine.load(machine)
    counts = _numbers(ranks)
    graph = training_graph(build_model(model), sample_shape(model, sample), batch)
    asking: dict[str, Any] = {
        "memory": parse_bytes(memory),
        "objective": objective,
        "keep": keep,
        "optimizer_slots": slots,
        "profile_seconds": profile_seconds,
        "exact": False if quick else None,
        "front": front,
    }
    answer = None
    try:
        with Waiting() as progress:
            asking["progress"] = progress
            if find is None:
                ranking = search(graph, where, counts, batch, **asking)
            else:
                answer = answer_to(find, graph, where, max(counts), batch, asking)
                ranking = answer.ranking
    except NoPlanError as error:
        if not as_json:
            raise
        print(json.dumps({"error": str(error)} | to_json(error.ranking)))
        raise typer.Exit(2) from error
    if as_json:
        found = {} if answer is None else {"found": {"question": find, "value": answer.value}}
        print(json.dumps(found | to_json(ranking)))
        return
    print(answer or ranking)
    if ranking.entries:
        print(f"Best: {ranking.best.plan}. {ranking.best.bottleneck}")
    for line in refusals(ranking.refused):
        print(line)


def answer_to(
    find: str, graph: Graph, machine: Machine, ranks: int, batch: int, asking: dict[str, Any]
) -> Answer:
    """Answer what else than the plan is unknown; `ranks` is the most where their number is asked for."""
    from shardwise.ask import search
    from shardwise.oracle import questions

    if find == "fewest-ranks":
        return questions.fewest_ranks(graph, machine, batch, most=ranks, ask=search, **asking)
    if find == "largest-batch":
        return questions.largest_batch(graph, machine, ranks, ask=search, **asking)
    if find == "largest-image":
        return questions.largest_image(graph, machine, ranks, batch, ask=search, **asking)
    raise ValueError(f"find: {find!r} found; choose one of fewest-ranks, largest-batch, largest-image")


def _numbers(text: str) -> list[int]:
    if not re.fullmatch(r"\s*[1-9]\d*(\s*,\s*[1-9]\d*)*\s*", text):
        raise ValueError(f"ranks: {text!r} found; write a number, or several with commas between them")
    return [int(number) for number in text.split(",")]


def refusals(refused: Sequence[Refused], most: int = 6) -> list[str]:
    """Return one line for each kind of reason, with the first plan that it holds for."""
    kinds: dict[str, list[Refused]] = {}
    for row in refused:
        kinds.setdefault(re.sub(r"[\d.]+", "", row.reason), []).append(row)
    lines = []
    for rows in list(kinds.values())[:most]:
        others = sum(row.count for row in rows) - 1
        more = f" (and {others} more like it)" if others else ""
        lines.append(f"refused: {rows[0].plan}: {rows[0].reason}{more}")
    return lines


def to_json(ranking: Any) -> dict[str, Any]:
    """Return a ranking as plain values."""
    counts = ranking.counts
    return {
        "plans": [
            {
                "plan": str(entry.plan),
                "ranks": entry.ranks,
                "step_seconds": entry.step_seconds,
                "samples_per_second": entry.samples_per_second,
                "peak_bytes": int(entry.peak_bytes),
                "bottleneck": entry.bottleneck,
            }
            for entry in ranking.entries
        ],
        "front": [
            {
                "plan": str(e.plan),
                "ranks": e.ranks,
                "step_seconds": e.step_seconds,
                "peak_bytes": int(e.peak_bytes),
            }
            for e in ranking.front
        ],
        "front_is_complete": ranking.front_is_complete,
        "refused": [{"plan": r.plan, "reason": r.reason, "count": r.count} for r in ranking.refused],
        "counts": {
            "enumerated": counts.enumerated,
            "refused": counts.refused,
            "pruned": counts.pruned,
            "simulated": counts.simulated,
        },
    }
