"""A job in which rank 1 misbehaves as the first argument says; every rank prints its process number."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

import shardwise.runtime as runtime


def misbehave(how: str) -> None:
    if how == "raise":
        raise ValueError("a layer went wrong")
    if how == "exit":
        sys.exit(3)
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "sleep":
        time.sleep(600)
    elif how == "deadlock":
        dist.recv(torch.empty(1), 0, tag=9)
    elif how == "compute":
        end = time.monotonic() + 5
        while time.monotonic() < end:
            torch.ones(64, 64) @ torch.ones(64, 64)


def main() -> None:
    how = sys.argv[1]
    session = runtime.init()
    torch.set_num_threads(1)
    dist.barrier()
    print(f"pid {os.getpid()} at {time.time():.3f}", flush=True)
    if session.rank == 1:
        misbehave(how)
    if how == "forgive":
        if session.rank == 0:
            with suppress(runtime.StalledError):
                dist.irecv(torch.empty(4), 1, tag=9).wait(timedelta(seconds=0.3))
        runtime.finalize()
        print("finished", flush=True)
        return
    if how == "group":
        if session.rank == 1:
            time.sleep(600)
        dist.new_group([0, 1])
    tensor = torch.ones(2, 3, dtype=torch.float64)
    if session.rank == 0:
        dist.recv(tensor, 1)
    else:
        dist.send(tensor, 0)
    runtime.finalize()
    print("finished", flush=True)


if __name__ == "__main__":
    main()
