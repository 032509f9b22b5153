"""The parameters and buffers of one rank: the user's own tensors where whole, slices of them where cut."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from shardwise.geometry import Box, Layout


class Store:
    """Hold what this rank's stages need of the model's state, under the user's names."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: dict[str, Tensor] = {}
        self.boxes: dict[str, Box] = {}
        self.parameters: dict[str, nn.Parameter] = {}

    def add(self, name: str, whole: Tensor, box: Box) -> Tensor:
        """Take a parameter or buffer in, sliced to `box`; return the local tensor.

        A tensor that is needed whole is the user's own, so that training shows in the user's model.
        """
        if name in self.tensors:
            if self.boxes[name] != box:
                raise ValueError(f"{name!r} is wanted as {box} and as {self.boxes[name]} on the same rank")
            return self.tensors[name]
        if box == Box.whole(whole.shape) and whole.device == self.device:
            local = whole
        else:
            local = whole.detach()[box.slices()].to(self.device, copy=True)
            if isinstance(whole, nn.Parameter):
                local = nn.Parameter(local, requires_grad=whole.requires_grad)
        self.tensors[name], self.boxes[name] = local, box
        if isinstance(local, nn.Parameter):
            self.parameters[name] = local
        return local

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the trainable parameters of this rank under the user's names."""
        for name, parameter in self.parameters.items():
            if parameter.requires_grad and parameter.numel():
                yield name, parameter


def fill_store(store: Store, layouts: Mapping[str, Layout], state: Mapping[str, Tensor], rank: int) -> None:
    """Take the boxes of one rank of a stage into its store."""
    for name, layout in layouts.items():
        store.add(name, state[name], layout.box(rank))
