"""Measure this machine: kernels, messages, collectives, overheads."""

from shardwise.runtime.calibrate.kernels import profile_kernels
from shardwise.runtime.calibrate.machine import available_transports, calibrate

__all__ = ["available_transports", "calibrate", "profile_kernels"]
