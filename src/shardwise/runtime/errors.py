"""Errors of the transport layer."""

from __future__ import annotations


class TransportError(RuntimeError):
    """Report that ranks could not be joined or a message could not be delivered."""


class StalledError(TransportError):
    """Report a wait that ended without its peer: a deadline passed or the peer is gone."""
