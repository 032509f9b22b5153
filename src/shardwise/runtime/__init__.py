"""Do: transports, regrid and the executor."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardwise.runtime.errors import StalledError, TransportError

if TYPE_CHECKING:
    from shardwise.runtime.session import Session, current, finalize, init, progress

__all__ = ["Session", "StalledError", "TransportError", "current", "finalize", "init", "progress"]


def __getattr__(name: str) -> Any:
    # Imported on first use: the launcher and its workers need none of it, nor torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("shardwise.runtime.session"), name)
