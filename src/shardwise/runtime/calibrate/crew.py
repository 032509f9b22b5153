"""Let the ranks of a running job take measurements, instead of starting ranks of their own.

Rank 0 decides what is measured; the others do what it asks until it is done:

    with crew() as leads:          on every rank of the job
        if leads:
            machine = calibrate()  every `measure` inside runs on all ranks of the job

The ranks, threads, devices and wires are then those that training will use, and no launcher is needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from shardwise.runtime.session import Session, current
from shardwise.runtime.wire import wire_of

# Of the process and not of a thread: calibration measures behind its progress bar.
_leads = False


@contextmanager
def crew() -> Iterator[bool]:
    """Yield True on rank 0, whose measurements all ranks take; the others first serve, then get False."""
    global _leads
    session = current()
    if session.rank:
        while (asked := share(session, None)) is not None:
            _together(session, *asked)
        yield False
        return
    _leads = True
    try:
        yield True
    finally:
        _leads = False
        share(session, None)


def is_leader() -> bool:
    """Tell whether the ranks of the running job wait for measurements to take."""
    return _leads


def ask_crew(function: str, arguments: Any) -> list[Any]:
    """Call `module:function(arguments)` on every rank of the job; return one result per rank."""
    session = current()
    share(session, (function, arguments))
    return _together(session, function, arguments)


def share(session: Session, value: Any) -> Any:
    """Return rank 0's value on every rank."""
    if session.size == 1:
        return value
    # Rank 0 may be long in coming; ranks that share cores sleep deepest in a sum of the runtime's own.
    wire_of(dist.group.WORLD, range(session.size)).all_reduce(torch.zeros(1, device=session.device))
    held = [value]
    dist.broadcast_object_list(held, src=0, device=session.device)
    return held[0]


def _together(session: Session, function: str, arguments: Any) -> list[Any]:
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(arguments)
    results: list[Any] = [result] * session.size
    if session.size > 1:
        dist.all_gather_object(results, result)
    return results
