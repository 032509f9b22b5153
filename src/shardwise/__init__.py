"""Predict, choose and run the best split of a convolutional network over a cluster."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise import keras, zoo
    from shardwise.ask import predict, search
    from shardwise.fit import Callback, CheckReport, EarlyStopping, History, Trainer, check, fit
    from shardwise.geometry import Box, Layout
    from shardwise.graph import Graph, capture
    from shardwise.machine import Machine, MachineError
    from shardwise.oracle import Prediction
    from shardwise.plan import Plan, PlanError
    from shardwise.runtime.calibrate import calibrate
    from shardwise.runtime.differentiable import regrid
    from shardwise.runtime.session import finalize, init

# Large tensors on huge pages: to fault them in page by page takes longer than to fill them. torch reads this
# when it first allocates memory.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# Public name -> the module that defines it. Imported on first use, so that `import shardwise` is quick.
_HOMES = {
    "Box": "shardwise.geometry",
    "Callback": "shardwise.fit",
    "CheckReport": "shardwise.fit",
    "EarlyStopping": "shardwise.fit",
    "Graph": "shardwise.graph",
    "History": "shardwise.fit",
    "Layout": "shardwise.geometry",
    "Machine": "shardwise.machine",
    "MachineError": "shardwise.machine",
    "Plan": "shardwise.plan",
    "PlanError": "shardwise.plan",
    "Prediction": "shardwise.oracle",
    "Trainer": "shardwise.fit",
    "calibrate": "shardwise.runtime.calibrate",
    "capture": "shardwise.graph",
    "check": "shardwise.fit",
    "finalize": "shardwise.runtime.session",
    "fit": "shardwise.fit",
    "init": "shardwise.runtime.session",
    "keras": "shardwise.keras",
    "predict": "shardwise.ask",
    "regrid": "shardwise.runtime.differentiable",
    "search": "shardwise.ask",
    "zoo": "shardwise.zoo",
}

__all__ = [
    "Box",
    "Callback",
    "CheckReport",
    "EarlyStopping",
    "Graph",
    "History",
    "Layout",
    "Machine",
    "MachineError",
    "Plan",
    "PlanError",
    "Prediction",
    "Trainer",
    "calibrate",
    "capture",
    "check",
    "finalize",
    "fit",
    "init",
    "keras",
    "predict",
    "regrid",
    "search",
    "zoo",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    module = importlib.import_module(_HOMES[name])
    return module if name in ("keras", "zoo") else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
