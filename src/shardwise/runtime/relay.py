"""Carry the output of ranks to the one terminal, line by line, with the rank in front.

Each rank opens three connections to the launcher's socket and says on the first line of each what it is:

    out / err   whatever the rank prints
    life        open as long as the rank lives; a number on it is the rank's exit code
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, TextIO

_COLOURS = ("36", "33", "35", "32", "34", "31", "96", "93")


@dataclass(frozen=True)
class Ended:
    """Say that a rank ended: with a code, or without a word."""

    rank: int
    pid: int
    code: int | None


class Relay:
    """Serve the socket that ranks print to."""

    def __init__(self, address: str, size: int, on_end: Callable[[Ended], None]) -> None:
        self.pids: dict[int, int] = {}
        self._on_end = on_end
        self._width = len(str(size - 1))
        self._lock = threading.Lock()
        self._readers: list[threading.Thread] = []
        self._beginning = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(address)
        self._listener.listen(3 * size)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self, seconds: float = 2.0) -> None:
        """Take no more connections and let the readers print what is left."""
        # A plain close would leave the accepting thread asleep.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._beginning:
            readers = list(self._readers)
        for reader in readers:
            reader.join(seconds)

    def say(self, text: str) -> None:
        """Print a line of the launcher's own."""
        with self._lock:
            print(f"shardwise run: {text}", file=sys.stderr, flush=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            reader = threading.Thread(target=self._read, args=(connection,), daemon=True)
            # Whoever closes meanwhile waits only for threads that have begun.
            with self._beginning:
                reader.start()
                self._readers.append(reader)

    def _read(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream:
            greeting = stream.readline()
            if not greeting:
                return
            hello = json.loads(greeting)
            rank, pid = int(hello["rank"]), int(hello["pid"])
            if hello["kind"] == "life":
                self.pids[rank] = pid
                word = _last_word(stream)
                self._on_end(Ended(rank, pid, int(word) if word else None))
                # Closing now would tell a rank that is still tidying up that its launcher is gone.
                _last_word(stream)
                return
            self._copy(stream, sys.stdout if hello["kind"] == "out" else sys.stderr, rank)

    def _copy(self, stream: BinaryIO, target: TextIO, rank: int) -> None:
        prefix = f"[{rank:>{self._width}}] "
        if target.isatty():
            prefix = f"\033[{_COLOURS[rank % len(_COLOURS)]}m{prefix}\033[0m"
        for line in stream:
            text = line.decode(errors="replace").rstrip("\n")
            with self._lock:
                print(prefix + text, file=target, flush=True)


def _last_word(stream: BinaryIO) -> bytes:
    try:
        # A line, not the end of the stream: a rank's code must be known before its end takes others along.
        return stream.readline().strip()
    except ConnectionError:
        return b""
