"""Layers of which nothing is known: the user's own module or function, on whole tensors.

Several ranks compute the same layer on the same tensors, so random numbers that it draws must be the same
on all of them: they are seeded by layer, step and first sample, and the rank's own generator stays as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.graph import Source
from shardwise.graph.layer import ModuleTarget
from shardwise.program import Compute
from shardwise.runtime.rules.dropout import key_of, scramble
from shardwise.runtime.rules.registry import OPAQUE, Run, cropped, fill, placed_rule
from shardwise.runtime.rules.straight import straight
from shardwise.runtime.rules.surroundings import Surroundings

# The generator belongs to the whole process; threads that seed it take turns.
_SEEDING = threading.Lock()


@placed_rule(OPAQUE)
def bind_opaque(op: Compute, rank: int, surroundings: Surroundings) -> Run:
    """Bind the user's own call, with the random numbers that all ranks agree on."""
    layer, call = op.layer, op.layer.call
    if call is None:
        raise ValueError(f"layer {layer.name!r} ({layer.op}) has neither a rule nor a call")
    pick, args, kwargs = cropped(op, rank), call.args, dict(call.kwargs)
    target = call.target
    state: dict[str, int] = {}
    # The user's own code may count on the order in memory that torch makes.
    origins = [operand.origin for operand in layer.operands]
    if isinstance(target, ModuleTarget):
        if target.path not in surroundings.modules:
            raise ValueError(f"layer {layer.name!r} calls the module {target.path!r}, which was not given")
        module = surroundings.modules[target.path]
        roles = {operand.role: i for i, operand in enumerate(layer.operands)}
        state = {name: roles[name] for name in layer.attributes["state"] if name in roles}

    def run(tensors: Sequence[Any]) -> Tensor:
        local = [
            t if origin is not Source.VALUE or not isinstance(t, Tensor) else t.contiguous()
            for t, origin in zip(pick(tensors), origins, strict=True)
        ]
        key = scramble(key_of(surroundings, layer.name) + surroundings.first_sample)
        with _SEEDING, torch.random.fork_rng(_devices(local)):
            torch.manual_seed(key % 2**63)
            inputs, options = fill(args, local), fill(kwargs, local)
            if isinstance(target, ModuleTarget):
                held = {name: local[i] for name, i in state.items()}
                result = torch.func.functional_call(module, held, inputs, options)
            else:
                result = target(*inputs, **options)
        made: Tensor = straight(result)
        return made

    return run


def _devices(tensors: Sequence[Any]) -> list[torch.device]:
    return [t.device for t in tensors[:1] if isinstance(t, Tensor) and t.device.type == "cuda"]
