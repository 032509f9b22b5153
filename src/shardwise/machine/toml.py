"""Frozen dataclasses to TOML and back, with errors that name the field."""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from shardwise.machine.curve import Curve
from shardwise.machine.errors import MachineError

T = TypeVar("T")


def read(kind: type[T], path: Path) -> T:
    """Read a dataclass from a TOML file."""
    with open(path, "rb") as file:
        try:
            content = tomllib.load(file)
        except tomllib.TOMLDecodeError as error:
            raise MachineError(str(path), f"not valid TOML: {error}") from None
    result: T = _decode(kind, content, "")
    return result


def write(value: Any, path: Path) -> None:
    """Write a dataclass to a TOML file."""
    path.write_text("\n".join(_table(_encode(value), "")).lstrip("\n") + "\n")


def _decode(kind: Any, data: Any, field: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _decode(next(a for a in arguments if a is not type(None)), data, field)
    if kind is Curve:
        return Curve(_decode(tuple[tuple[float, float], ...], data, field))
    if dataclasses.is_dataclass(kind):
        return _record(kind, data, field)
    if origin is tuple:
        _expect(data, list, field, "an array")
        inner = arguments[:1] * len(data) if arguments[-1] is Ellipsis else arguments
        if len(inner) != len(data):
            raise MachineError(field, f"{len(data)} numbers found", f"give {len(inner)}")
        return tuple(_decode(a, item, field) for a, item in zip(inner, data, strict=True))
    if origin is not None and issubclass(origin, Mapping):
        _expect(data, dict, field, "a table")
        return {key: _decode(arguments[1], item, f"{field}.{key}") for key, item in data.items()}
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    _expect(data, kind, field, f"a value of type {kind.__name__}")
    return data


def _record(kind: Any, data: Any, field: str) -> Any:
    _expect(data, dict, field or "file", "a table")
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    prefix = f"{field}." if field else ""
    for key in data:
        if key not in fields:
            near = get_close_matches(key, fields, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(fields)}"
            raise MachineError(prefix + key, "no such field", hint)
    for name, f in fields.items():
        missing = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if missing and name not in data:
            raise MachineError(prefix + name, "missing", f"add `{name} = ...`")
    return kind(**{key: _decode(hints[key], value, prefix + key) for key, value in data.items()})


def _expect(data: Any, kind: Any, field: str, words: str) -> None:
    wrong_bool = isinstance(data, bool) and kind is not bool
    if wrong_bool or not isinstance(data, kind):
        raise MachineError(field, f"{data!r} found", f"{words} is expected")


def _encode(value: Any) -> Any:
    if isinstance(value, Curve):
        return [list(p) for p in value.points]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = {f.name: (getattr(value, f.name), f) for f in dataclasses.fields(value)}
        return {name: _encode(v) for name, (v, f) in pairs.items() if not _default(v, f)}
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value


def _default(value: Any, field: dataclasses.Field[Any]) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return field.default is not dataclasses.MISSING and bool(value == field.default)


def _table(data: Mapping[str, Any], path: str) -> list[str]:
    """Write the plain values of a table first, then its tables, as TOML demands."""
    lines = [f"{_key(k)} = {_value(v)}" for k, v in data.items() if not _is_table(v) and not _is_tables(v)]
    for key, value in data.items():
        name = f"{path}.{_key(key)}" if path else _key(key)
        if _is_table(value):
            lines += ["", f"[{name}]", *_table(value, name)]
        elif _is_tables(value):
            for item in value:
                lines += ["", f"[[{name}]]", *_table(item, name)]
    return lines


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _key(key: str) -> str:
    plain = key.replace("_", "").replace("-", "")
    return key if plain.isascii() and plain.isalnum() else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        text = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
        return f'"{text}"'
    return "[" + ", ".join(_value(item) for item in value) + "]"
