"""Questions that a search answers when something else than the plan is unknown.

"Will it fit at all, and on how many ranks?" is monotone in ranks (plans may leave some idle) and, but for
rounding, in the samples and pixels: such questions are answered by doubling, then halving the interval.
Whether anything fits is asked of bytes summed over layers (`Room`), and so are the plans for the answer; on
few ranks these are simulated event by event before they are shown, which has the last word.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.graph import Graph
from shardwise.machine import Machine
from shardwise.oracle.search import Counts, NoPlanError, Ranking, search
from shardwise.oracle.search.allowance import check_ranks
from shardwise.oracle.search.ranking import front_of
from shardwise.oracle.search.room import Family, Room
from shardwise.oracle.search.search import EXACT_RANKS

Search = Callable[..., Ranking]


@dataclass(frozen=True)
class Answer:
    """The number that was asked for, and the ranking of the plans with it."""

    question: str
    value: int
    ranking: Ranking

    def __str__(self) -> str:
        return f"{self.question}: {self.value}\n{self.ranking}"


def over_ranks(
    graph: Graph,
    machine: Machine | str,
    counts: Sequence[int],
    batch: int | None = None,
    *,
    ask: Search = search,
    **asking: Any,
) -> Ranking:
    """Rank the plans for several numbers of ranks together: "the fastest on up to 64" and the like."""
    keep = asking.get("keep", 10)
    rankings = []
    for count in sorted(set(counts)):
        try:
            rankings.append(ask(graph, machine, count, batch, **asking))
        except NoPlanError as error:
            reason = error
    if not counts:
        raise ValueError("ranks: no number found; give at least one")
    if not rankings:
        raise reason
    objective = rankings[0].objective
    entries = {str(entry.plan): entry for ranking in rankings for entry in ranking}
    ordered = sorted(entries.values(), key=lambda e: (e.score(objective), e.ranks))
    front = front_of(entry for ranking in rankings for entry in ranking.front)
    totals = [sum(getattr(r.counts, f.name) for r in rankings) for f in dataclasses.fields(Counts)]
    refused = tuple(dict.fromkeys(r for ranking in rankings for r in ranking.refused))
    last = rankings[-1]
    return dataclasses.replace(
        last,
        entries=tuple(ordered[:keep]),
        front=front,
        front_is_complete=all(r.front_is_complete for r in rankings),
        refused=refused,
        counts=Counts(*totals),
    )


def fewest_ranks(
    graph: Graph,
    machine: Machine | str,
    batch: int | None = None,
    *,
    most: int = 4096,
    ask: Search = search,
    **asking: Any,
) -> Answer:
    """Return the fewest ranks on which some plan fits, with the plans for that many.

    Args:
        graph, machine, batch: as in `search`.
        most: give up beyond so many ranks.
        ask: what searches.
        asking: further arguments of `search`, such as `memory`.
    """

    where = Machine.load(machine)
    most = min(most, where.most_ranks or most)
    room, samples = _room(graph, where, most, asking), batch or graph.batch

    def fits(ranks: int) -> bool:
        return room.fits(ranks, samples)

    high = 1
    while not fits(high):
        if high >= most:
            raise ValueError(f"no plan fits on up to {most} ranks of {where.name}")
        high = min(2 * high, most)
    found = _smallest(fits, high // 2, high)
    ranking = _ranked(ask, graph, machine, found, batch, asking)
    while ranking is None and found < most:
        found += 1
        ranking = _ranked(ask, graph, machine, found, batch, asking)
    if ranking is None:
        raise ValueError(f"no plan fits on up to {most} ranks of {where.name}")
    return Answer("fewest ranks that fit", found, ranking)


def largest_batch(
    graph: Graph,
    machine: Machine | str,
    ranks: int,
    *,
    most: int = 1 << 20,
    ask: Search = search,
    **asking: Any,
) -> Answer:
    """Return the largest global mini-batch that fits on so many ranks, with the plans for it."""

    room = _room(graph, machine, ranks, asking)

    def fits(batch: int) -> bool:
        return room.fits(ranks, batch)

    reason = f"not even one sample fits on {ranks} ranks"
    found = _largest(fits, graph.batch, most, reason)
    found, ranking = _confirmed(
        found, lambda batch: _ranked(ask, graph, machine, ranks, batch, asking), reason
    )
    return Answer("largest mini-batch that fits", found, ranking)


def largest_image(
    graph: Graph,
    machine: Machine | str,
    ranks: int,
    batch: int | None = None,
    *,
    step: int = 32,
    most: int = 1 << 17,
    ask: Search = search,
    **asking: Any,
) -> Answer:
    """Return the largest side of an image that fits, a multiple of `step`; other sides keep their ratio."""

    samples = batch or graph.batch
    image = len(graph.shapes[0][2:])
    hopeless: dict[Family, int] = {}

    def need(count: int) -> tuple[float, float]:
        # With as many samples as ranks the network is not followed once more for them.
        larger = resized(graph, count * step, max(graph.batch, ranks))
        room = _room(larger, machine, ranks, asking)
        # What is too large for smaller images is too large for these.
        known = {family for family, since in hopeless.items() if since <= count}
        nbytes, found = room.least(ranks, samples, known)
        hopeless.update((family, min(count, hopeless.get(family, count))) for family in found)
        return nbytes, room.limit.of(ranks)

    begin = max(1, graph.shapes[0][2] // step) if graph.shapes[0][2:] else 1
    reason = f"not even {step} pixels fit on {ranks} ranks"
    found, ranking = _confirmed(
        _most(need, begin, most // step, image, reason),
        lambda count: _ranked(ask, resized(graph, count * step), machine, ranks, batch, asking),
        reason,
    )
    return Answer("largest image that fits, first side in pixels", step * found, ranking)


def resized(graph: Graph, side: int, batch: int | None = None) -> Graph:
    """Return the network for images whose first side has so many pixels; targets of that size follow.

    Args:
        graph: the network.
        side: pixels of the first side; others keep their ratio to it.
        batch: samples; default: as many as before.
    """
    image = graph.shapes[0][2:]
    if not image:
        raise ValueError("image: the network's first input has no spatial dimensions to change")
    sizes = tuple(max(1, round(n * side / image[0])) for n in image)
    shapes = []
    for shape in graph.shapes:
        if shape[2:] == image:
            shapes.append((*shape[:2], *sizes))
        elif shape[1:] == image:
            shapes.append((shape[0], *sizes))
        else:
            shapes.append(shape)
    return graph.at(*((batch or shape[0], *shape[1:]) for shape in shapes))


def _room(graph: Graph, machine: Machine | str, ranks: int, asking: dict[str, Any]) -> Room:
    """Return who knows whether anything fits; with as many samples as ranks all tails can be told apart."""
    names = ("memory", "optimizer_slots", "all_ranks", "refuse")
    given = {name: asking[name] for name in names if name in asking}
    where = Machine.load(machine)
    check_ranks(where, ranks)
    many = graph if graph.batch >= ranks else graph.with_batch(ranks)
    return Room(many, where, **given)


def _ranked(
    ask: Search, graph: Graph, machine: Machine | str, ranks: int, batch: int | None, asking: dict[str, Any]
) -> Ranking | None:
    """Rank the plans of an answer, if any: the best of sums over layers, simulated where few ranks admit it.

    Sums are not exact: what needs least may fit where what is fastest does not, and the search that
    simulates every plan has the last word where neither does.
    """

    def asked(**more: Any) -> Ranking | None:
        try:
            return ask(graph, machine, ranks, batch, **asking | more)
        except NoPlanError:
            return None

    if asking.get("exact") is not None or ranks > EXACT_RANKS:
        return asked()
    for objective in dict.fromkeys((asking.get("objective", "time"), "memory")):
        quick = asked(exact=False, objective=objective)
        found = quick.simulated() if quick is not None else None
        if found is not None and found.entries:
            return found
    return asked()


def _smallest(good: Callable[[int], bool], low: int, high: int) -> int:
    """Return the smallest number that is good, where `low` is not and `high` is."""
    while high - low > 1:
        middle = (low + high) // 2
        if good(middle):
            high = middle
        else:
            low = middle
    return high


def _largest(good: Callable[[int], bool], begin: int, most: int, reason: str) -> int:
    """Return the largest number up to `most` that is good, looking around `begin` first."""
    low, high = min(begin, most), most + 1
    while not good(low):
        if low == 1:
            raise ValueError(reason)
        low, high = low // 2, low
    while 2 * low < high and good(2 * low):
        low *= 2
    high = min(high, 2 * low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def _most(need: Callable[[int], tuple[float, float]], begin: int, most: int, power: int, reason: str) -> int:
    """Return the largest number up to `most` that fits, where bytes grow about with a power of it.

    Each guess lies on the line through what the last numbers needed, so that few are enough; every third one
    halves the interval, whatever the bytes do.

    Args:
        need: returns the bytes that a number needs, and how many there may be.
        begin: the first guess.
        most: no larger number is looked at.
        power: with which bytes grow.
        reason: what to say if not even 1 fits.
    """
    low, high, guess = 0, most + 1, min(max(1, begin), most)
    points: list[tuple[float, float]] = [(0.0, 0.0)]
    for turn in itertools.count(1):
        nbytes, limit = need(guess)
        low, high = (guess, high) if nbytes <= limit else (low, guess)
        if high - low <= 1:
            break
        points = [points[-1], (float(guess) ** power, nbytes)]
        (x, y), (to, there) = points
        line = to + (limit - there) * (to - x) / (there - y) if there != y else -1.0
        guess = int(min(max(line, 0.0), float(most) ** power) ** (1 / power))
        if turn % 3 == 0 and high <= most:
            guess = (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)
    if not low:
        raise ValueError(reason)
    return low


def _confirmed(value: int, ranked: Callable[[int], Ranking | None], reason: str) -> tuple[int, Ranking]:
    """Step back while the full search, which simulates every rank, finds no plan that fits."""
    ranking = ranked(value)
    while ranking is None and value > 1:
        value -= max(1, value // 32)
        ranking = ranked(value)
    if ranking is None:
        raise ValueError(reason)
    return value, ranking
