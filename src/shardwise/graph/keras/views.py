"""How a Keras variable is seen as the parameter of a torch function: always a view of the same memory.

kernel of            Keras                      here
convolution          (*k, in, out)              (out, in, *k)
transposed conv.     (*k, out, in)              (in, out, *k)
depthwise conv.      (*k, channels, times)      (channels * times, 1, *k)
dense                (in, out)                  (out, in)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class View:
    """See a variable in the order of dimensions that torch wants; `merged` joins the first two of them."""

    dims: tuple[int, ...] = ()
    merged: bool = False

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the tensor as torch wants it, in the same memory."""
        if not self.dims:
            return tensor
        view = tensor.permute(self.dims)
        if self.merged:
            return view.view(view.shape[0] * view.shape[1], 1, *view.shape[2:])
        return view

    def invert(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return what `apply` made as Keras has it, of the given shape."""
        if not self.dims:
            return tensor
        if self.merged:
            tensor = tensor.reshape(tuple(shape[d] for d in self.dims))
        inverse = sorted(range(len(self.dims)), key=self.dims.__getitem__)
        return tensor.permute(inverse)


AS_IS = View()
DENSE = View((1, 0))


def conv_view(rank: int) -> View:
    """Return the view of a convolution's kernel, with `rank` spatial dimensions."""
    return View((rank + 1, rank, *range(rank)))


def depthwise_view(rank: int) -> View:
    """Return the view of a depthwise convolution's kernel."""
    return View((rank, rank + 1, *range(rank)), merged=True)
