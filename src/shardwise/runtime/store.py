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
        self._pieces: dict[tuple[str, Box], Tensor] = {}

    def add(self, name: str, whole: Tensor, box: Box) -> Tensor:
        """Take a parameter or buffer in, sliced to `box`; return the local tensor.

        A tensor that is needed whole is the user's own, so that training shows in the user's model.
        """
        if box == Box.whole(whole.shape) and whole.device == self.device:
            local = whole
        else:
            local = whole.detach()[box.slices()].to(self.device, copy=True)
            if isinstance(whole, nn.Parameter):
                local = nn.Parameter(local, requires_grad=whole.requires_grad)
        return self.put(name, local, box)

    def put(self, name: str, local: Tensor, box: Box) -> Tensor:
        """Take in a tensor that is already this rank's box."""
        if name in self.tensors:
            raise ValueError(f"{name!r} is in the store already, as {self.boxes[name]}")
        self.tensors[name], self.boxes[name] = local, box
        if isinstance(local, nn.Parameter):
            self.parameters[name] = local
        return local

    def local(self, name: str, box: Box) -> Tensor:
        """Return the part of a tensor that one stage reads: all that is held, or a view of it."""
        held = self.boxes[name]
        if box == held or box.empty:
            return self.tensors[name]
        if not held.contains(box):
            raise ValueError(f"{name!r}: {box} is needed, this rank holds {held}")
        if (name, box) not in self._pieces:
            tensor = self.tensors[name]
            view = tensor.detach()[box.slices(held)]
            trained = isinstance(tensor, nn.Parameter)
            self._pieces[name, box] = nn.Parameter(view, tensor.requires_grad) if trained else view
        return self._pieces[name, box]

    def open_gradients(self) -> None:
        """Let the gradients of views be views of the gradient of what is held."""
        for (name, box), piece in self._pieces.items():
            parameter = self.parameters.get(name)
            if parameter is None or not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            piece.grad = parameter.grad[box.slices(self.boxes[name])]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the trainable parameters of this rank under the user's names."""
        for name, parameter in self.parameters.items():
            if parameter.requires_grad and parameter.numel():
                yield name, parameter

    @property
    def parameter_bytes(self) -> int:
        """Return the memory of this rank's parameters."""
        return sum(p.nbytes for p in self.parameters.values())


def fill_boxes(store: Store, boxes: Mapping[str, Box], state: Mapping[str, Tensor]) -> None:
    """Take this rank's boxes of whole tensors into its store."""
    for name, box in boxes.items():
        store.add(name, state[name], box)


def fill_store(store: Store, layouts: Mapping[str, Layout], state: Mapping[str, Tensor], rank: int) -> None:
    """Take the boxes of one rank of a stage into its store."""
    fill_boxes(store, {name: layout.box(rank) for name, layout in layouts.items()}, state)
