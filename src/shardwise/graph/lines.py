"""Where in the user's own code something happened."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from shardwise.graph.errors import DataControlFlow

_INTERNAL = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")


def current_line() -> str:
    """Return file and line of the innermost running frame that is the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_INTERNAL):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def error_line(error: BaseException) -> str:
    """Return file and line of the innermost frame of the user's in the traceback of `error`."""
    found = ""
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith(_INTERNAL):
            found = f"{name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def text_line(stack: str) -> str:
    """Return file and line of the innermost frame of the user's in a printed stack."""
    found = re.findall(r'File "([^"]+)", line (\d+)', stack)
    users = [f"{name}:{line}" for name, line in found if not name.startswith((*_INTERNAL, "torch/"))]
    return users[-1] if users else ""


def first_line(error: BaseException) -> str:
    """Return type and first line of an error's message."""
    if isinstance(error, (DataControlFlow, DataDependentOutputException, GuardOnDataDependentSymNode)):
        return str(DataControlFlow())
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
