"""Functions of one element, and joins of several values element by element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.geometry.access import WHOLE, Access, Axis, same
from shardwise.graph.canonical import name_of, plain
from shardwise.graph.errors import Opaque
from shardwise.graph.fake import Value, distinct
from shardwise.graph.layer import Kind
from shardwise.graph.normalise.helpers import broadcast
from shardwise.graph.normalise.registry import rule
from shardwise.graph.site import Site
from shardwise.graph.trace import leaves

_NAMES = """
abs absolute neg negative positive sign sgn exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal
sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh arcsin arccos arctan erf erfc erfinv lgamma
digamma sigmoid logit sinc floor ceil round trunc frac fix rad2deg deg2rad logical_not bitwise_not invert not_
isnan isinf isfinite nan_to_num angle real conj
relu relu6 elu celu selu leaky_relu gelu silu mish logsigmoid log_sigmoid hardswish hardsigmoid hardtanh
hardshrink softshrink softplus softsign tanhshrink threshold identity clamp clip clamp_min clamp_max
add sub subtract rsub mul multiply div divide truediv true_divide floor_divide floordiv remainder mod fmod pow
float_power maximum minimum fmax fmin atan2 arctan2 hypot logaddexp xlogy copysign lerp addcmul addcdiv
eq ne lt le gt ge equal not_equal less less_equal greater greater_equal
logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor and_ or_ xor where masked_fill
__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __neg__ __abs__
__and__ __or__ __xor__ __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __mod__ __floordiv__
to type type_as float double half bfloat16 int long short bool byte cpu contiguous clone detach
requires_grad_ alias lift_fresh_copy _to_copy zeros_like ones_like full_like empty_like
"""

_OPS = {"truediv": "div", "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub"}
_OPS |= {"negative": "neg", "absolute": "abs", "clip": "clamp", "_to_copy": "to", "log_sigmoid": "logsigmoid"}


@rule(*_NAMES.split())
def elementwise(site: Site, *args: Any, **kwargs: Any) -> Any:
    """Describe a function of single elements; with two or more values it is a join."""
    target = plain(site.step.target)
    values = distinct((args, kwargs))
    if not values:
        return _plain(site, target, args, kwargs)
    if name_of(target) == "type" and len(args) == 1:
        raise Opaque("the name of a tensor's type")
    ran = site.run(target, *args, **kwargs)
    if len(ran.made) != 1:
        return ran.result
    out = ran.one.shape
    everything = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Value)]
    roles = ("input", "other", *(f"other{i}" for i in range(2, len(everything))))
    reads = [(roles[i], v, broadcast(v.shape, out)) for i, v in enumerate(everything)]
    several = sum(v.origin == "value" for v in everything) > 1
    name = name_of(target).strip("_")
    return site.add(
        ran,
        (target, args, kwargs),
        kind=Kind.JOIN if several else Kind.ELEMENTWISE,
        op=_OPS.get(name, name),
        reads=reads,
        attributes=_settings(args, kwargs),
    )


def _plain(site: Site, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Compute what has no tensor in it: sizes are numbers."""
    result = target(*args, **kwargs)
    if isinstance(result, torch.Tensor):
        raise Opaque("a tensor made of numbers")
    return result


def _settings(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    numbers = [a for a in args if isinstance(a, (int, float)) and not isinstance(a, bool)]
    named = {k: v for k, v in kwargs.items() if isinstance(v, (int, float, bool, str))}
    return ({"numbers": tuple(numbers)} if numbers else {}) | named


@rule("softmax", "log_softmax", "softmin", "_softmax", "_log_softmax")
def softmax(
    site: Site, input: Value, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Value:
    """Describe (log-)softmax: whole along its dimension."""
    name = name_of(site.step.target).strip("_")
    if name == "softmin" or dim is None:
        raise Opaque(f"{name} without a dimension")
    if isinstance(_stacklevel, torch.dtype):  # torch.softmax has the dtype in this place
        dtype = _stacklevel
    dim %= max(1, input.ndim)
    access = tuple(WHOLE if d == dim else Axis(d) for d in range(input.ndim))
    return site.emit(
        F.softmax if name == "softmax" else F.log_softmax,
        (input, dim),
        {} if not isinstance(dtype, torch.dtype) else {"dtype": dtype},
        kind=Kind.ELEMENTWISE,
        op=name,
        reads=[("input", input, access)],
        attributes={"dim": dim},
    )


@rule("prelu", "_prelu_kernel")
def prelu(site: Site, input: Value, weight: Value) -> Value:
    """Describe PReLU: one slope, or one per channel."""
    per: Access = (WHOLE,) if weight.shape[-1:] in ((1,), ()) or input.ndim < 2 else (Axis(1),)
    return site.emit(
        F.prelu,
        (input, weight),
        {},
        kind=Kind.ELEMENTWISE,
        op="prelu",
        reads=[("input", input, same(input.ndim)), ("weight", weight, per[: weight.ndim])],
    )


@rule("rrelu")
def rrelu(site: Site, *args: Any, **kwargs: Any) -> Value:
    """Leave random slopes to a whole layer."""
    raise Opaque("rrelu draws random slopes")
