"""Dropout whose mask is a function of where an element is, not of who computes it.

Every element of a mini-batch has a number: its sample's position in the mini-batch and its position in the
sample. A hash of (seed, step, layer, sample, position) decides whether it is kept. So the mask is the same
under every plan, on pixels that two ranks compute, and on one process; and each rank only makes its own box.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.geometry import Box
from shardwise.program import Compute
from shardwise.runtime.rules.registry import Run, cropped, placed_rule
from shardwise.runtime.rules.surroundings import Surroundings

_BITS = 63
_WORD = 1 << 64
# Odd constants of the SplitMix64 generator (Steele, Lea, Flood 2014).
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(word: int) -> int:
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word


def scramble(word: int) -> int:
    """Mix the 64 bits of a number, as SplitMix64 does."""
    word = (word ^ (word >> 30)) * _FIRST % _WORD
    word = (word ^ (word >> 27)) * _SECOND % _WORD
    return word ^ (word >> 31)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift right without copies of the sign."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _scramble(words: Tensor) -> Tensor:
    words = (words ^ _shifted(words, 30)).mul_(_signed(_FIRST))
    words = (words ^ _shifted(words, 27)).mul_(_signed(_SECOND))
    return words ^ _shifted(words, 31)


def key_of(surroundings: Surroundings, layer: str) -> int:
    """Return the number that all masks of one layer in one step start from."""
    key = scramble(surroundings.seed * _GOLDEN % _WORD)
    key = scramble((key + surroundings.step * _GOLDEN) % _WORD)
    return scramble((key + zlib.crc32(layer.encode()) * _GOLDEN) % _WORD)


def positions(shape: Sequence[int], box: Box, device: torch.device) -> Tensor:
    """Number the elements of a box by their place in a sample; dimension 0, the samples, has extent one."""
    total = torch.zeros((1,) * len(shape), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(1, len(shape))):
        view = [1] * len(shape)
        view[dim] = -1
        total = total + (torch.arange(*box.ranges[dim], device=device) * stride).view(view)
        stride *= shape[dim]
    return total


def keep_mask(key: int, first_sample: int, box: Box, places: Tensor, p: float) -> Tensor:
    """Return which elements of a box survive dropout with probability 1 - p."""
    samples = torch.arange(*box.ranges[0], device=places.device) + first_sample
    samples = _scramble(samples.mul_(_signed(_GOLDEN)).add_(_signed(key)))
    words = places.mul(_signed(_GOLDEN)).add(samples.view(-1, *(1,) * (places.ndim - 1)))
    return _shifted(_scramble(words), 64 - _BITS + 1) >= int(p * 2.0 ** (_BITS - 1))


@placed_rule("dropout")
def bind_dropout(op: Compute, rank: int, surroundings: Surroundings) -> Run:
    """Bind dropout of elements, or of whole channels."""
    p: float = op.layer.attributes["p"]
    name, pick = op.layer.name, cropped(op, rank)
    shape, box = op.layer.shape, op.makes.layout.box(rank)
    kept = {"element": len(shape), "channel": 2, "sample": 1}[op.layer.attributes["per"]]
    if kept < len(shape):
        # One number per sample (and channel) decides for all of its pixels.
        rest = len(shape) - kept
        shape = (*shape[:kept], *(1,) * rest)
        box = Box((*box.lo[:kept], *(0,) * rest), (*box.hi[:kept], *(1,) * rest))
    scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0

    def run(tensors: Sequence[Any]) -> Tensor:
        x: Tensor = pick(tensors)[0]
        places = positions(shape, box, x.device)
        rows = shape[0] // surroundings.samples if surroundings.samples else 1
        first = surroundings.first_sample * max(1, rows)
        keep = keep_mask(key_of(surroundings, name), first, box, places, p)
        return torch.where(keep, x * scale, 0.0)

    return run
