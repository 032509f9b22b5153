"""Be one rank of a measurement: join the job, call the function, leave the result."""

from __future__ import annotations

import importlib
import pickle
import sys
from pathlib import Path

from shardwise.runtime.session import finalize, init


def main() -> None:
    """Do what the folder given on the command line says."""
    folder = Path(sys.argv[1])
    function, arguments = pickle.loads((folder / "arguments").read_bytes())
    session = init()
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(arguments)
    (folder / f"result-{session.rank}").write_bytes(pickle.dumps(result))
    finalize()


if __name__ == "__main__":
    main()
