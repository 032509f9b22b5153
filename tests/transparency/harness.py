"""Train a model under a plan on real ranks and compare everything with one device.

A case names its model by a factory that each rank can import; every rank builds the same model from the
same seed. Rank 0 of the pool also trains the plain model, unsplit, on the same micro-batches.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ranks import run_ranks
from shardwise.graph import Graph, capture
from shardwise.plan import Plan
from shardwise.plan.micro_batches import micro_batches_of, samples_of
from shardwise.training import trainer as training
from transparency.compare import Outcome, failures, worst_of

STEPS = 3


@dataclass(frozen=True)
class Case:
    """One comparison.

    Args:
        model: name of a factory in `models.MODELS`.
        shape: of the input, batch first.
        plan: one line.
        loss: name of a loss in `models.LOSSES`; it also says which targets it wants.
        settings: keyword arguments of the factory.
        steps: of SGD with momentum.
        seed: of weights and data.
        order: of images in memory.
    """

    model: str
    shape: tuple[int, ...]
    plan: str
    loss: str = "mse"
    settings: tuple[tuple[str, Any], ...] = ()
    steps: int = STEPS
    seed: int = 0
    order: str = "auto"

    @property
    def ranks(self) -> int:
        return Plan.parse(self.plan).ranks

    @property
    def alone(self) -> Case:
        """Return what one device has to do with it: only micro-batches and replicas matter there."""
        plan = Plan.parse(self.plan)
        line = self.plan if plan.data * micro_batches_of(plan) > 1 else "data=1"
        return replace(self, plan=line, order="auto")

    @property
    def name(self) -> str:
        settings = "".join(f",{key}={value}" for key, value in self.settings)
        shape = "x".join(map(str, self.shape))
        return f"{self.model}{settings}-{shape}-{self.loss}-{self.plan}".replace(" ", ",")


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.01, momentum=0.9)


def prepare(case: Case) -> tuple[nn.Module, Any, list[tuple[Tensor, Any]]]:
    """Return model, loss and the mini-batches of all steps, the same on every rank."""
    model, loss, batches = _prepared(case.alone)
    return copy.deepcopy(model), loss, batches


@lru_cache(maxsize=4)
def _prepared(case: Case) -> tuple[nn.Module, Any, list[tuple[Tensor, Any]]]:
    from transparency.models import LOSSES, MODELS

    torch.manual_seed(case.seed)
    model = MODELS[case.model](**dict(case.settings)).double().train()
    loss, target = LOSSES[case.loss]
    inputs = [torch.randn(case.shape, dtype=torch.float64) for _ in range(case.steps)]
    with torch.no_grad():
        out = copy.deepcopy(model)(inputs[0])
    return model, loss, [(x, target(out)) for x in inputs]


@lru_cache(maxsize=4)
def _graph(case: Case) -> Graph:
    model, _, batches = prepare(case)
    return capture(model, batches[0][0], training=True)


def last_bit(tensor: Tensor) -> Tensor:
    """Round every number up or down in its last bit, by chance."""
    return (
        torch.nextafter(tensor, tensor + torch.randn_like(tensor)) if tensor.is_floating_point() else tensor
    )


def unsplit(case: Case, variant: str = "") -> Outcome:
    """Train on one device; a pool that meets the same training under another plan knows the outcome."""
    return _unsplit(case.alone, variant)


@lru_cache(maxsize=12)
def _unsplit(case: Case, variant: str) -> Outcome:
    """Train on one device, micro-batch by micro-batch.

    The variants `reversed` (samples in reverse order), `rounded` (data differs in the last bit) and `turned`
    (images with channels last) give the same results but for rounding.
    """
    model, loss, batches = prepare(case)
    if variant == "turned":
        model = model.to(memory_format=torch.channels_last)
        batches = [(x.contiguous(memory_format=torch.channels_last), y) for x, y in batches]
    if variant == "rounded":
        batches = [(last_bit(x), y) for x, y in batches]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(last_bit(parameter))
    optimizer = sgd(model.named_parameters())
    plan, losses = Plan.parse(case.plan), []
    inputs: Tensor | None = None
    for x, y in batches:
        optimizer.zero_grad(set_to_none=True)
        inputs, total = torch.zeros_like(x), 0.0
        for m in range(micro_batches_of(plan)):
            shares = [samples_of(plan, len(x), r, m) for r in range(plan.data)]
            rows = torch.cat([torch.arange(*share) for share in shares])
            if variant == "reversed":
                rows = rows.flip(0)
            if not len(rows):
                continue
            leaf = x[rows].requires_grad_()
            value = loss(model(leaf), y[rows]) * (len(rows) / len(x))
            value.backward()
            total += float(value.detach())
            inputs[rows] = leaf.grad if leaf.grad is not None else 0.0
        optimizer.step()
        losses.append(total)
    grads = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in model.named_parameters()}
    state = {name: t.detach() for name, t in model.state_dict().items()}
    return Outcome(losses, grads, state, [] if inputs is None else [inputs])


def split(case: Case) -> Outcome:
    """Train under the plan, on this rank of the pool."""
    model, loss, batches = prepare(case)
    x, y = batches[0]
    # A rank that meets the same model under another plan knows its graph.
    with mock.patch.object(training, "network_of", return_value=_graph(case.alone)):
        trainer = training.Trainer(
            model,
            (x, y),
            case.plan,
            loss=loss,
            optimizer=sgd,
            input_gradients=True,
            memory_order=case.order,
        )
    losses = [trainer.step(x, y) for x, y in batches]
    # A parameter that no layer uses has no gradient.
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    return Outcome(losses, zeros | trainer.gradients(), trainer.state_dict(), trainer.input_gradients())


@dataclass(frozen=True)
class Comparison:
    """What rank 0 found: what is too far from one device, and the largest error of each quantity."""

    bad: dict[str, float]
    worst: dict[str, float]


def compared(case: Case) -> tuple[Comparison | None, float]:
    """Return what rank 0 found; and a number in which all ranks must agree."""
    found = split(case)
    sum_of_all = sum(float(tensor.double().sum()) for tensor in found.tensors().values())
    if dist.is_initialized() and dist.get_rank() > 0:
        return None, sum_of_all
    expected = unsplit(case)
    bad = failures(found, expected)
    if bad:
        variants = ["reversed", "rounded"]
        if case.order == "last" and len(case.shape) == 4:
            variants.append("turned")
        bad = failures(found, expected, [unsplit(case, variant) for variant in variants])
    return Comparison(bad, worst_of(found, expected)), sum_of_all


def check(case: Case, transport: str = "mpi4py", deadline: float = 120.0) -> dict[str, float]:
    """Fail if anything differs from one device, or from rank to rank; return the errors that were met."""
    results = run_ranks(compared, case.ranks, transport, (case,), deadline=deadline)
    found: Comparison = results[0][0]
    worst = sorted(found.bad.items(), key=lambda item: -item[1])[:8]
    text = "\n".join(f"    {error:.2e}  {name}" for name, error in worst)
    assert not found.bad, (
        f"{case.name} on {transport}: {len(found.bad)} results differ from one device\n{text}"
    )
    sums = [number for _, number in results]
    assert len(set(map(repr, sums))) == 1, f"{case.name} on {transport}: ranks hold different results {sums}"
    return found.worst
