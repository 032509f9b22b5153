"""The launcher's end of the ranks' output."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path

import pytest

from shardwise.runtime.relay import Ended, Relay


def test_a_rank_that_connects_while_the_relay_closes_harms_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    address = str(tmp_path / "socket")
    relay = Relay(address, 1, lambda _ended: None)
    start, begun = threading.Thread.start, threading.Event()

    def late(self: threading.Thread) -> None:
        begun.set()
        time.sleep(0.2)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", late)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as rank:
        rank.connect(address)
        rank.sendall(json.dumps({"rank": 0, "pid": 1, "kind": "out"}).encode() + b"\nlast words\n")
        assert begun.wait(5.0)
        rank.shutdown(socket.SHUT_WR)
        relay.close()
    assert "[0] last words" in capfd.readouterr().out


def test_the_end_of_a_rank_is_told_with_its_code(tmp_path: Path) -> None:
    ends: list[Ended] = []
    address = str(tmp_path / "socket")
    relay = Relay(address, 1, ends.append)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as rank:
        rank.connect(address)
        rank.sendall(json.dumps({"rank": 0, "pid": 7, "kind": "life"}).encode() + b"\n3\n")
        end = time.monotonic() + 5.0
        while not ends and time.monotonic() < end:
            time.sleep(0.01)
    relay.close()
    assert ends == [Ended(0, 7, 3)]
