"""One rank of a pool: join the job, then run whatever function arrives on the socket."""

from __future__ import annotations

import importlib.util
import os
import pickle
import sys
import traceback
from multiprocessing.connection import Client
from types import ModuleType
from typing import Any

import torch

import shardwise.runtime.session as session


def load(name: str, file: str) -> ModuleType:
    """Import a test module under the name pytest gave it, whatever pytest's import mode is."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def call(payload: bytes) -> tuple[bool, Any]:
    """Return (True, result) or (False, traceback text)."""
    try:
        name, file, qualname, arguments = pickle.loads(payload)
        target: Any = load(name, file)
        args, kwargs = pickle.loads(arguments)
        for part in qualname.split("."):
            target = getattr(target, part)
        return True, target(*args, **kwargs)
    except BaseException:
        return False, traceback.format_exc()


def main() -> None:
    torch.set_num_threads(1)
    joined = session.init(backend=sys.argv[1])
    with Client(
        os.environ["RANKS_ADDRESS"], "AF_UNIX", authkey=bytes.fromhex(os.environ["RANKS_KEY"])
    ) as parent:
        parent.send((joined.rank, os.getpid()))
        while True:
            try:
                payload = parent.recv_bytes()
            except EOFError:
                # pytest is gone; so is every reason to stay.
                os._exit(0)
            answer = call(payload)
            try:
                data = pickle.dumps(answer)
            except Exception:
                data = pickle.dumps((False, f"the result cannot be pickled:\n{traceback.format_exc()}"))
            parent.send_bytes(data)


if __name__ == "__main__":
    main()
