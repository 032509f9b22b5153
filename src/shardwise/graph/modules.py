"""The functional form of torch's own modules: which function they call, with which settings and weights.

A rule gets the module, a function that refers to its tensors by local name, and the module's arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from shardwise.graph import functional
from shardwise.graph.trace import Weight

Refer = Callable[[str], Weight | None]
Form = tuple[Any, tuple[Any, ...], dict[str, Any]]
Rule = Callable[..., Form]
_RULES: dict[type, Rule] = {}


def form(*classes: type) -> Callable[[Rule], Rule]:
    """Register the functional form of module classes."""

    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(classes, rule))
        return rule

    return register


def known(module: nn.Module) -> bool:
    """Tell whether a module is exactly one of the known ones: no hooks, no overridden forward."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return False
    return _rule(type(module)) is not None and "forward" not in vars(module)


def _rule(cls: type) -> Rule | None:
    # A subclass counts only as long as it changes nothing about the computation.
    for base in cls.__mro__:
        if base in _RULES:
            return _RULES[base]
        if not set(vars(base)).isdisjoint(_OVERRIDES):
            return None
    return None


_OVERRIDES = ("forward", "_conv_forward", "__call__", "__getattr__", "weight", "bias")


def functional_form(
    module: nn.Module, weight: Refer, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Form:
    """Return the function that a known module calls, and its arguments."""
    rule = _rule(type(module))
    if rule is None:
        raise KeyError(f"{type(module).__name__} has no functional form")
    return rule(module, weight, *args, **kwargs)


_CONV: dict[type, Callable[..., Any]] = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
_UNCONV: dict[type, Callable[..., Any]] = {
    nn.ConvTranspose1d: F.conv_transpose1d,
    nn.ConvTranspose2d: F.conv_transpose2d,
    nn.ConvTranspose3d: F.conv_transpose3d,
}


def _base(module: nn.Module, table: Mapping[type, Any]) -> Any:
    return next(table[c] for c in type(module).__mro__ if c in table)


@form(*_CONV)
def _conv(m: Any, weight: Refer, x: Any) -> Form:
    kwargs: dict[str, Any] = {"padding_mode": m.padding_mode} if m.padding_mode != "zeros" else {}
    args = (x, weight("weight"), weight("bias"), m.stride, m.padding, m.dilation, m.groups)
    return _base(m, _CONV), args, kwargs


@form(*_UNCONV)
def _unconv(m: Any, weight: Refer, x: Any, output_size: Any = None) -> Form:
    args = (x, weight("weight"), weight("bias"), m.stride, m.padding, m.output_padding, m.groups, m.dilation)
    return _base(m, _UNCONV), args, {} if output_size is None else {"output_size": output_size}


@form(nn.Linear)
def _linear(m: Any, weight: Refer, x: Any) -> Form:
    return F.linear, (x, weight("weight"), weight("bias")), {}


@form(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
def _batch_norm(m: Any, weight: Refer, x: Any) -> Form:
    batch = m.training or (m.running_mean is None and m.running_var is None)
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    kwargs = {"batch_statistics": batch, "momentum": m.momentum, "eps": m.eps}
    return functional.batch_norm, (x, *map(weight, names)), kwargs


@form(nn.GroupNorm)
def _group_norm(m: Any, weight: Refer, x: Any) -> Form:
    return F.group_norm, (x, m.num_groups, weight("weight"), weight("bias"), m.eps), {}


@form(nn.LayerNorm)
def _layer_norm(m: Any, weight: Refer, x: Any) -> Form:
    return F.layer_norm, (x, m.normalized_shape, weight("weight"), weight("bias"), m.eps), {}


@form(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def _instance_norm(m: Any, weight: Refer, x: Any) -> Form:
    tensors = [weight(n) for n in ("running_mean", "running_var", "weight", "bias")]
    momentum = m.momentum if m.momentum is not None else 0.0
    use_input = m.training or not m.track_running_stats
    return F.instance_norm, (x, *tensors, use_input, momentum, m.eps), {}


@form(nn.LocalResponseNorm)
def _lrn(m: Any, weight: Refer, x: Any) -> Form:
    return F.local_response_norm, (x, m.size, m.alpha, m.beta, m.k), {}


_MAX: dict[type, Any] = {nn.MaxPool1d: F.max_pool1d, nn.MaxPool2d: F.max_pool2d, nn.MaxPool3d: F.max_pool3d}
_AVG: dict[type, Any] = {nn.AvgPool2d: F.avg_pool2d, nn.AvgPool3d: F.avg_pool3d}
_ADAPTIVE: dict[type, Any] = {
    getattr(nn, f"Adaptive{kind}Pool{n}d"): getattr(F, f"adaptive_{kind.lower()}_pool{n}d")
    for kind in ("Avg", "Max")
    for n in (1, 2, 3)
}


@form(*_MAX)
def _max_pool(m: Any, weight: Refer, x: Any) -> Form:
    kwargs = {"ceil_mode": m.ceil_mode}
    if m.return_indices:
        kwargs["return_indices"] = True
    return _base(m, _MAX), (x, m.kernel_size, m.stride, m.padding, m.dilation), kwargs


@form(nn.AvgPool1d)
def _avg_pool1d(m: Any, weight: Refer, x: Any) -> Form:
    args = (x, m.kernel_size, m.stride, m.padding, m.ceil_mode, m.count_include_pad)
    return F.avg_pool1d, args, {}


@form(*_AVG)
def _avg_pool(m: Any, weight: Refer, x: Any) -> Form:
    args = (x, m.kernel_size, m.stride, m.padding, m.ceil_mode, m.count_include_pad, m.divisor_override)
    return _base(m, _AVG), args, {}


@form(*_ADAPTIVE)
def _adaptive(m: Any, weight: Refer, x: Any) -> Form:
    kwargs = {"return_indices": True} if getattr(m, "return_indices", False) else {}
    return _base(m, _ADAPTIVE), (x, m.output_size), kwargs


# Module -> function and the names of the settings that are its arguments.
_PLAIN: dict[type, tuple[Any, tuple[str, ...]]] = {
    nn.ReLU: (F.relu, ()),
    nn.ReLU6: (F.relu6, ()),
    nn.ELU: (F.elu, ("alpha",)),
    nn.CELU: (F.celu, ("alpha",)),
    nn.SELU: (F.selu, ()),
    nn.LeakyReLU: (F.leaky_relu, ("negative_slope",)),
    nn.SiLU: (F.silu, ()),
    nn.Mish: (F.mish, ()),
    nn.Sigmoid: (torch.sigmoid, ()),
    nn.LogSigmoid: (F.logsigmoid, ()),
    nn.Tanh: (torch.tanh, ()),
    nn.Hardswish: (F.hardswish, ()),
    nn.Hardsigmoid: (F.hardsigmoid, ()),
    nn.Hardtanh: (F.hardtanh, ("min_val", "max_val")),
    nn.Hardshrink: (F.hardshrink, ("lambd",)),
    nn.Softshrink: (F.softshrink, ("lambd",)),
    nn.Softplus: (F.softplus, ("beta", "threshold")),
    nn.Softsign: (F.softsign, ()),
    nn.Tanhshrink: (F.tanhshrink, ()),
    nn.Threshold: (F.threshold, ("threshold", "value")),
    nn.GLU: (F.glu, ("dim",)),
    nn.Softmax: (F.softmax, ("dim",)),
    nn.LogSoftmax: (F.log_softmax, ("dim",)),
    nn.Flatten: (torch.flatten, ("start_dim", "end_dim")),
    nn.Unflatten: (torch.unflatten, ("dim", "unflattened_size")),
    nn.PixelShuffle: (F.pixel_shuffle, ("upscale_factor",)),
    nn.PixelUnshuffle: (F.pixel_unshuffle, ("downscale_factor",)),
    nn.ChannelShuffle: (F.channel_shuffle, ("groups",)),
    nn.Identity: (functional.identity, ()),
}


@form(*_PLAIN)
def _plain(m: Any, weight: Refer, x: Any) -> Form:
    function, settings = _base(m, _PLAIN)
    return function, (x, *(getattr(m, name) for name in settings)), {}


@form(nn.GELU)
def _gelu(m: Any, weight: Refer, x: Any) -> Form:
    return F.gelu, (x,), {"approximate": m.approximate}


@form(nn.PReLU)
def _prelu(m: Any, weight: Refer, x: Any) -> Form:
    return F.prelu, (x, weight("weight")), {}


@form(nn.Softmax2d)
def _softmax2d(m: Any, weight: Refer, x: Any) -> Form:
    return F.softmax, (x, -3), {}


_DROPOUT: dict[type, Any] = {
    nn.Dropout: F.dropout,
    nn.Dropout1d: F.dropout1d,
    nn.Dropout2d: F.dropout2d,
    nn.Dropout3d: F.dropout3d,
    nn.AlphaDropout: F.alpha_dropout,
    nn.FeatureAlphaDropout: F.feature_alpha_dropout,
}


@form(*_DROPOUT)
def _dropout(m: Any, weight: Refer, x: Any) -> Form:
    return _base(m, _DROPOUT), (x, m.p, m.training), {}


@form(nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d)
def _upsample(m: Any, weight: Refer, x: Any) -> Form:
    args = (x, m.size, m.scale_factor, m.mode, m.align_corners)
    recompute = {"recompute_scale_factor": True} if m.recompute_scale_factor else {}
    return F.interpolate, args, recompute


_PADS: dict[type, str] = {
    getattr(nn, f"{name}Pad{n}d"): mode
    for name, mode in {
        "Constant": "constant",
        "Zero": "constant",
        "Reflection": "reflect",
        "Replication": "replicate",
        "Circular": "circular",
    }.items()
    for n in (1, 2, 3)
}


@form(*_PADS)
def _pad(m: Any, weight: Refer, x: Any) -> Form:
    mode = _base(m, _PADS)
    value = (
        {"value": m.value} if mode == "constant" and isinstance(m, nn.modules.padding._ConstantPadNd) else {}
    )
    return F.pad, (x, m.padding, mode), value


@form(nn.Embedding)
def _embedding(m: Any, weight: Refer, x: Any) -> Form:
    return F.embedding, (x, weight("weight"), m.padding_idx, m.max_norm, m.norm_type), {}


_LOSSES: dict[type, tuple[Any, tuple[str, ...], tuple[str, ...]]] = {
    nn.CrossEntropyLoss: (F.cross_entropy, ("weight",), ("ignore_index", "reduction", "label_smoothing")),
    nn.NLLLoss: (F.nll_loss, ("weight",), ("ignore_index", "reduction")),
    nn.MSELoss: (F.mse_loss, (), ("reduction",)),
    nn.L1Loss: (F.l1_loss, (), ("reduction",)),
    nn.SmoothL1Loss: (F.smooth_l1_loss, (), ("reduction", "beta")),
    nn.HuberLoss: (F.huber_loss, (), ("reduction", "delta")),
    nn.BCELoss: (F.binary_cross_entropy, ("weight",), ("reduction",)),
    nn.BCEWithLogitsLoss: (
        F.binary_cross_entropy_with_logits,
        ("weight", "pos_weight"),
        ("reduction",),
    ),
    nn.KLDivLoss: (F.kl_div, (), ("reduction", "log_target")),
    nn.PoissonNLLLoss: (F.poisson_nll_loss, (), ("log_input", "full", "eps", "reduction")),
    nn.SoftMarginLoss: (F.soft_margin_loss, (), ("reduction",)),
}


@form(*_LOSSES)
def _loss(m: Any, weight: Refer, input: Any, target: Any) -> Form:
    function, tensors, settings = _base(m, _LOSSES)
    kwargs = {name: weight(name) for name in tensors} | {name: getattr(m, name) for name in settings}
    return function, (input, target), kwargs
