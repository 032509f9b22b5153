"""Put together what the ranks of a trainer hold: gradients and weights as whole tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.runtime.gather import stream
from shardwise.runtime.materialise import on_meta

if TYPE_CHECKING:
    from shardwise.training.trainer import Trainer


class WholeState:
    """Whole tensors of a trainer by the user's names; every rank must ask for the same."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def _own(self) -> dict[str, Tensor]:
        """Return the tensors of the user's model."""
        model = self.trainer.model
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def stream(self, names: Iterable[str], local: Any, to: int | None) -> Iterator[tuple[str, Tensor | None]]:
        """Yield (name, whole tensor) one after another, on one rank or, with None, on all of them."""
        t = self.trainer
        specs = {**t.graph.parameters, **t.graph.buffers}
        return stream(t.fabric, t.placement, specs, local, names, t.device, to)

    def whole(self, names: Iterable[str], local: Any) -> dict[str, Tensor]:
        """Return whole tensors, all at once on every rank."""
        return {name: tensor for name, tensor in self.stream(names, local, None) if tensor is not None}

    def state_dict(self) -> dict[str, Tensor]:
        """Return parameters and buffers."""
        t = self.trainer
        names = (*t.graph.parameters, *t.graph.buffers)
        whole, own = self.whole(names, t.store.tensors), self._own()
        # What no layer uses is on no rank; it is as the user made it.
        unused = {name: x.detach().clone() for name, x in own.items() if not x.is_meta and name in names}
        found = unused | {name: tensor for name, tensor in whole.items() if name in own}
        # As the user's own `state_dict`: every name of a tied weight, and no buffer that is not to be kept.
        found |= {name: found[first] for name, first in t.graph.tied.items() if first in found}
        kept = t.model.state_dict(keep_vars=True).keys()
        return {name: tensor for name, tensor in found.items() if name in kept}

    def to_first_rank(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield parameters and buffers on rank 0, one at a time."""
        t, own = self.trainer, self._own()
        names = [name for name in (*t.graph.parameters, *t.graph.buffers) if name in own]
        return self.stream(names, t.store.tensors, 0)

    def write_back(self, names: Iterable[str] | None) -> None:
        """Copy what was trained into the user's model, unless that has no data or was trained in place."""
        t = self.trainer
        if on_meta(t.model):
            return
        own = self._own()
        if t.fabric.size == 1:
            # Alone, what is no copy needs none.
            own = {name: tensor for name, tensor in own.items() if tensor is not t.store.tensors.get(name)}
        with torch.no_grad():
            wanted = [name for name in (t.placement.held if names is None else names) if name in own]
            for name, tensor in self.stream(wanted, t.store.tensors, None):
                if tensor is not None and own[name] is not t.store.tensors.get(name):
                    own[name].copy_(tensor)
