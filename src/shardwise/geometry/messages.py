"""What must travel so that a tensor in one layout becomes the same tensor in another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from shardwise.geometry.box import Box
from shardwise.geometry.layout import Layout


class Message(NamedTuple):
    """Copy `box` of the global tensor from one rank to another (a local copy if they are the same)."""

    source: int
    target: int
    box: Box


@lru_cache(maxsize=1024)
def messages(src: Layout, dst: Layout) -> tuple[Message, ...]:
    """List the copies that take a tensor from layout `src` to layout `dst`.

    The result defines a linear map: the target tensors start at zero and every message adds its box.
    Which messages there are follows from what the two layouts mean:

        src whole:    one source serves an element     src partial:  all sources that hold it do
        dst whole:    every target that holds it       dst partial:  exactly one target gets it
                      gets it                                         (the others keep zero)

    Read backwards (source and target exchanged) the same list is the adjoint map.
    """
    if src.shape != dst.shape:
        raise ValueError(f"messages: source shape {src.shape} and target shape {dst.shape} differ")
    if not dst.partial:
        return _pull(src, dst)
    if src.partial:
        # The transpose of "every source element is wanted, exactly one target serves it".
        return tuple(
            Message(m.target, m.source, m.box) for m in _pull(dst.as_partial(False), src.as_partial(False))
        )
    return _one_to_one(src, dst)


def _pull(src: Layout, dst: Layout) -> tuple[Message, ...]:
    """Serve every element of every target box, from one source or, if partial, from all."""
    result: list[Message] = []
    for i, (target, wanted) in enumerate(zip(dst.ranks, dst.boxes, strict=True)):
        if wanted.empty:
            continue
        if src.partial:
            result += [
                Message(source, target, wanted.intersect(box))
                for source, box in zip(src.ranks, src.boxes, strict=True)
                if wanted.meets(box)
            ]
        else:
            result += _cover(wanted, target, i * len(src.ranks) // len(dst.ranks), src)
    return tuple(result)


def _cover(wanted: Box, target: int, preferred: int, src: Layout) -> list[Message]:
    """Cut `wanted` into pieces that single sources hold, asking the target itself first."""
    rest = [wanted]
    result: list[Message] = []
    for source, box in _preference(wanted, target, preferred, src):
        left: list[Box] = []
        for part in rest:
            if part.meets(box):
                result.append(Message(source, target, part.intersect(box)))
                left.extend(part.minus(box))
            else:
                left.append(part)
        rest = left
        if not rest:
            break
    return result


def _preference(wanted: Box, target: int, preferred: int, src: Layout) -> Sequence[tuple[int, Box]]:
    """List the sources that hold anything of `wanted`: the target itself, then round from `preferred`."""
    pairs = list(zip(src.ranks, src.boxes, strict=True))
    order = [pair for pair in pairs[preferred:] + pairs[:preferred] if wanted.meets(pair[1])]
    return [p for p in order if p[0] == target] + [p for p in order if p[0] != target]


def _one_to_one(src: Layout, dst: Layout) -> tuple[Message, ...]:
    """Send every element from one source to one target; elements stay where they are if they can."""
    taken: list[Box] = []
    result: list[Message] = []
    shared = [r for r in dst.ranks if r in src.ranks]
    order = shared + [r for r in dst.ranks if r not in src.ranks]
    # First what can stay, over all ranks, so that no element travels to a rank before its holder was asked.
    for stay in (True, False):
        for target in order:
            rest = [dst.box(target)]
            if stay:
                rest = [rest[0].intersect(src.box(target))]
            for box in taken:
                if rest and any(part.meets(box) for part in rest):
                    rest = [piece for part in rest for piece in part.minus(box)]
            for part in rest:
                if not part.empty:
                    result += _cover(part, target, 0, src)
                    taken.append(part)
    return tuple(result)
