"""The plan: how the training of a network is split, on one line, as TOML, or as this dataclass."""

from __future__ import annotations

import dataclasses
import json
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.plan.errors import PlanError
from shardwise.plan.split import WAYS, Split, Way, parse_grid, parse_split

if TYPE_CHECKING:
    from shardwise.graph import Graph

SCHEDULES = ("layer", "gpipe", "1f1b", "gems-mast", "gems-master", "bidirectional", "zero-bubble")
HALOS = ("layer", "fused", "auto")
TAILS = ("auto", "batch", "replicate", "filter")
NORMS = ("sync", "local", "deferred")
_UNBUILT = {
    "checkpoint": "activation checkpointing does not exist yet",
    "precision": "only the model's own precision exists yet",
    "optimizer_sharding": "sharding of the optimizer does not exist yet",
    "streaming": "streaming of tiles does not exist yet",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Say how to split a training step over the ranks.

    Args:
        data: replicas of the whole pipeline, each with its share of the mini-batch.
        stages: the cuts of the network, each with its own split; one entry per stage.
        schedule: in which order the stages work.
        micro_batches: parts of a replica's share that flow through the stages one after another.
        halo: exchange borders before each layer, fused over chains, over a fixed number of layers, or auto.
        tail: what happens after the last layer that can be tiled.
        batch_norm: `sync` over all ranks that share a micro-batch, `local` to each rank, or `deferred`.
        cuts: names of the first layer of each stage but the first, or counts of layers; empty: balanced.
        replication: rounds of gems-master before an update.
    """

    data: int = 1
    stages: tuple[Split, ...] = (Split(),)
    schedule: str = "1f1b"
    micro_batches: int = 1
    halo: str = "layer"
    tail: str = "auto"
    batch_norm: str = "sync"
    cuts: tuple[str, ...] = ()
    replication: int = 1

    def __post_init__(self) -> None:
        for field in ("data", "micro_batches", "replication"):
            value = getattr(self, field)
            if type(value) is not int or value < 1:
                raise PlanError(field, f"{value!r} found", "it must be a whole number of at least 1")
        _one_of("schedule", self.schedule, SCHEDULES)
        _one_of("tail", self.tail, TAILS)
        _one_of("batch_norm", self.batch_norm, NORMS)
        if self.halo not in HALOS and not (self.halo.isdecimal() and int(self.halo) >= 1):
            raise PlanError("halo", f"{self.halo!r} found", "write layer, fused, auto or a number of layers")
        if not self.stages:
            raise PlanError("stages", "no stage found", "a plan has at least one")
        for name in self.cuts:
            if not name or "," in name or any(ord(c) < 32 for c in name):
                raise PlanError("cuts", f"{name!r} found", "write names of layers, separated by commas")

    @property
    def ranks(self) -> int:
        """Return how many ranks the plan needs."""
        return self.data * sum(stage.width for stage in self.stages)

    @staticmethod
    def parse(text: str | Plan) -> Plan:
        """Read a plan from one line such as `data=2 stages=2x2|1|1 schedule=1f1b micro_batches=8`."""
        if isinstance(text, Plan):
            return text
        fields: dict[str, str] = {}
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise PlanError("plan", f"{text!r} cannot be read: {error}", "close every quote") from error
        for word in words:
            key, eq, value = word.partition("=")
            if not eq or not value:
                raise PlanError(key, "a field without a value", "write field=value, separated by spaces")
            if key in fields:
                raise PlanError(key, "given twice", "give it once")
            fields[key] = value
        return _build(fields)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan from a TOML file."""
        with open(path, "rb") as file:
            content = tomllib.load(file)
        return _build({key: _text(key, value) for key, value in content.items()})

    def save(self, path: str | Path) -> None:
        """Write the plan to a TOML file."""
        lines = [f"{key} = {_toml(value)}" for key, value in self._fields().items()]
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")

    def replace(self, **changes: Any) -> Plan:
        """Return the plan with some fields changed."""
        return dataclasses.replace(self, **changes)

    def explain(self, graph: Graph | None = None) -> str:
        """Say in words what the plan does, and draw which rank plays which part.

        Args:
            graph: the network, to name the layers of every stage too.
        """
        # The explanation reads plans, so it can be imported only when there is one.
        from shardwise.plan.explain import explain

        return explain(self, graph)

    def _fields(self) -> dict[str, int | str]:
        """Return the fields that differ from the defaults, in the words of the one-line form."""
        fields: dict[str, int | str] = {}
        if self.data > 1:
            fields["data"] = self.data
        first = self.stages[0]
        if all(s == first for s in self.stages):
            if len(self.stages) > 1:
                fields["stages"] = len(self.stages)
            if first.way is not Way.NONE:
                fields[str(first.way)] = "x".join(map(str, first.grid))
        else:
            fields["stages"] = "|".join(map(str, self.stages))
        for name in ("schedule", "micro_batches", "halo", "tail", "batch_norm", "replication"):
            value = getattr(self, name)
            if value != Plan.__dataclass_fields__[name].default:
                fields[name] = value
        if self.cuts:
            fields["cuts"] = ",".join(self.cuts)
        return fields

    def __str__(self) -> str:
        return " ".join(f"{key}={_word(value)}" for key, value in self._fields().items()) or "data=1"


def _build(fields: Mapping[str, str]) -> Plan:
    left = dict(fields)
    for name, reason in _UNBUILT.items():
        if left.get(name, "none") != "none":
            raise PlanError(name, reason, "leave it out")
        left.pop(name, None)
    ways = [way for way in WAYS if way in left]
    if len(ways) > 1:
        raise PlanError(ways[1], f"a stage is split one way, {ways[0]} is given too", "choose one of them")
    inside = Split()
    if ways:
        size = left.pop(ways[0])
        inside = parse_split(f"{ways[0]}:{size}", ways[0])
    text = left.pop("stages", "1")
    if text.isdecimal():
        stages = (inside,) * _number("stages", text)
    elif ways:
        raise PlanError(ways[0], f"stages={text} already gives each stage its split", "leave one of them out")
    else:
        stages = tuple(parse_split(part, "stages") for part in text.split("|"))
    kwargs: dict[str, Any] = {"stages": stages}
    for name in ("data", "micro_batches", "replication"):
        if name in left:
            kwargs[name] = _number(name, left.pop(name))
    for name in ("schedule", "halo", "tail", "batch_norm"):
        if name in left:
            kwargs[name] = left.pop(name)
    if "cuts" in left:
        kwargs["cuts"] = tuple(left.pop("cuts").split(","))
    if left:
        known = f"data, stages, {', '.join(WAYS)}, schedule, micro_batches, halo, tail, cuts"
        raise PlanError(next(iter(left)), "no such field", f"known are {known}, batch_norm, replication")
    return Plan(**kwargs)


def _number(field: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise PlanError(field, f"{text!r} found", "it must be a whole number of at least 1")
    return int(text)


def _one_of(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise PlanError(field, f"{value!r} found", f"choose one of {', '.join(choices)}")


def _text(key: str, value: Any) -> str:
    return ("|" if key == "stages" else ",").join(map(str, value)) if isinstance(value, list) else str(value)


def _word(value: int | str) -> str:
    """Quote what would fall apart between the words of a line."""
    text = str(value)
    return shlex.quote(text) if any(c.isspace() or c in "'\"\\#" for c in text) else text


def _toml(value: int | str) -> str:
    """Write a number or a basic string; JSON escapes strings the same way."""
    return str(value) if isinstance(value, int) else json.dumps(value, ensure_ascii=False)


__all__ = ["Plan", "PlanError", "Split", "Way", "parse_grid"]
