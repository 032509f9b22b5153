"""Do: transports, regrid and the executor."""

from shardwise.runtime.errors import StalledError, TransportError
from shardwise.runtime.session import Session, current, finalize, init, progress

__all__ = ["Session", "StalledError", "TransportError", "current", "finalize", "init", "progress"]
