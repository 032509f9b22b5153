"""A small network, a simple machine and kernels of known times, shared by the oracle's tests."""

from functools import cache

import torch
from torch import nn

from shardwise.graph import Graph, capture
from shardwise.machine import Device, Link, Machine, Node, Tier
from shardwise.oracle import Direction, Estimate
from shardwise.plan import Plan
from shardwise.program import lower_stage


def small_model() -> nn.Module:
    """Two convolutions of 3x3 with batch norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)
    )


@cache
def small_graph() -> Graph:
    """The small network on four samples of 3x16x16."""
    return capture(small_model(), torch.zeros(4, 3, 16, 16), check=False)


def stage(text: str, batch: int | None = None, **options):
    """Lower the small network under a plan of one stage."""
    graph, plan = small_graph(), Plan.parse(text)
    graph = graph if batch is None else graph.with_batch(batch)
    return lower_stage(graph, graph.layers, plan.stages[0], departures=graph.output_names, **options)


def machine(**fields) -> Machine:
    """One message costs 1 ms plus 1 us per byte; copies are free; the optimizer moves 1 kB/s."""
    device = Device("simple", {"float32": 1e9}, 1e9, 1e30, update_bytes_per_second=1e3)
    tier = Tier("node", 0, Link(1e-3, 1e6))
    return Machine(
        **{"name": "simple", "device": device, "node": Node(8, 8), "tiers": (tier,), "sources": {}} | fields
    )


class Fixed:
    """Every direction of every kernel takes a given time per output element."""

    def __init__(self, forward=1e-6, backward_input=2e-6, backward_weight=3e-6, spread=0.0):
        self.rates = {
            Direction.FORWARD: forward,
            Direction.BACKWARD_INPUT: backward_input,
            Direction.BACKWARD_WEIGHT: backward_weight,
        }
        self.spread = spread

    def seconds(self, task, direction):
        made = 2 * task.out.size if task.rectifies else task.out.size
        return Estimate(self.rates[direction] * made, self.spread)

    def room(self, task, direction):
        return 0.0

    def lateness(self):
        return ()

    def updates(self):
        return (), 1.0

    def sums(self):
        return {}

    def moving(self, move):
        return Estimate(0.0)

    def fields(self):
        return ()
