"""On what: devices, memory and networks as data, with presets and a source for every number."""

from shardwise.machine.curve import Curve
from shardwise.machine.errors import MachineError
from shardwise.machine.machine import Device, Machine, Node
from shardwise.machine.network import Collective, Link, Tier

__all__ = ["Collective", "Curve", "Device", "Link", "Machine", "MachineError", "Node", "Tier"]
