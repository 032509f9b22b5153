"""Write the steps of a trace: plain functions, nothing overwritten, modules in functional form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shardwise.graph import canonical
from shardwise.graph.errors import CaptureError
from shardwise.graph.example import spec_of
from shardwise.graph.layer import ModuleTarget, Source
from shardwise.graph.modules import functional_form, known
from shardwise.graph.trace import Held, Result, Step, Weight


class StepWriter:
    """Collect steps; readers of a value that was overwritten are rewired to the newest one.

    Args:
        model: the traced model.
        names: name in the model of each parameter, buffer and constant, by the tensor's id.
        opaque: why modules of these classes cannot be entered.
    """

    def __init__(self, model: nn.Module, names: Mapping[int, str], opaque: Mapping[type, str]) -> None:
        self.names = names
        self.opaque = opaque
        self.modules = dict(model.named_modules())
        self.used: dict[str, nn.Module] = {}
        self.steps: list[Step] = []
        self.overwritten: dict[str, str] = {}

    def newest(self, value: Any) -> Any:
        """Return what a reader of `value` sees now."""
        while isinstance(value, Result) and value.id in self.overwritten:
            value = Result(self.overwritten[value.id])
        return value

    def function(
        self,
        key: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        scope: str = "",
        module: str = "",
        where: str = "",
    ) -> Result:
        """Add the call of a function or method, in its out-of-place form."""
        target, writes = canonical.out_of_place(target)
        if kwargs.get("inplace"):
            kwargs, writes = {**kwargs, "inplace": False}, True
        if writes and args and isinstance(args[0], Weight):
            raise CaptureError(f"the model changes its own tensor {args[0].name!r} here", where)
        name = canonical.name_of(target) or getattr(target, "__name__", "function")
        name = name.removeprefix("aten.").strip("_")
        label = module or (f"{scope}.{name}" if scope else name)
        return self._add(
            Step(
                id=key,
                target=target,
                args=args,
                kwargs=kwargs,
                label=label,
                module=module,
                where=where,
                mutates=args[0].id if writes and args and isinstance(args[0], Result) else "",
            )
        )

    def guard(self, key: str, target: Any, value: Result, expected: Any, where: str) -> Result:
        """Add a decision of the model's control flow, which must come out the same for other shapes."""
        return self._add(Step(key, target, (value,), label="guard", where=where, guard=expected))

    def call_module(
        self, key: str, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, where: str
    ) -> Result:
        """Add the call of a module that was not entered."""
        module = self.modules[path]
        if not known(module):
            self.used[path] = module
            kind = f"torch.nn.{type(module).__name__}"
            state = {
                local: self.names[id(tensor)]
                for local, tensor in (*module.named_parameters(), *module.named_buffers())
            }
            return self._add(
                Step(
                    id=key,
                    target=ModuleTarget(path),
                    args=args,
                    kwargs=kwargs,
                    label=path,
                    module=path,
                    where=where,
                    reason=self.opaque.get(type(module), f"{kind} has no rule of its own"),
                    state=state,
                )
            )

        def weight(local: str) -> Weight | None:
            # Not by attribute: while tracing, those are traced values themselves.
            tensor = module._parameters.get(local, module._buffers.get(local))
            return None if tensor is None else Weight(self.names[id(tensor)])

        target, new_args, new_kwargs = functional_form(module, weight, args, kwargs)
        writes = getattr(module, "inplace", False) and isinstance(args[0], Result)
        return self._add(
            Step(
                id=key,
                target=target,
                args=new_args,
                kwargs=new_kwargs,
                label=path,
                module=path,
                where=where,
                mutates=args[0].id if writes else "",
            )
        )

    def _add(self, step: Step) -> Result:
        self.steps.append(step)
        if step.mutates:
            self.overwritten[step.mutates] = step.id
        return Result(step.id)


def holdings(model: nn.Module, constants: Mapping[str, Tensor]) -> tuple[dict[str, Held], dict[str, str]]:
    """Return everything a model holds by its first name, and the other names of tied parameters."""
    held: dict[str, Held] = {}
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
        else:
            held[name] = Held(spec_of(parameter), Source.PARAMETER, parameter.requires_grad)
    for name, buffer in (*model.named_buffers(), *constants.items()):
        held[name] = Held(spec_of(buffer), Source.BUFFER)
    return held, tied


def first_names(model: nn.Module) -> dict[int, str]:
    """Return the first name of every parameter and buffer, by the tensor's id."""
    result: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        result.setdefault(id(tensor), name)
    return result
