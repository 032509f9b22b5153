"""Train a model split over the ranks of the job, one step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.graph import Graph, Kind
from shardwise.graph.attach import attach
from shardwise.graph.foreign import Foreign
from shardwise.graph.trace import leaves
from shardwise.plan import Plan, check, mesh_of, micro_batches_of
from shardwise.program.lowered import Lowered, lower
from shardwise.runtime.checkpoint import load_state, save_state
from shardwise.runtime.clip import clip_gradients
from shardwise.runtime.counts import Feed
from shardwise.runtime.engine import Bench, Engine
from shardwise.runtime.events import Event, Recorder
from shardwise.runtime.fabric import Fabric
from shardwise.runtime.materialise import Init, materialise, on_meta
from shardwise.runtime.order import FIRST, Order
from shardwise.runtime.overlap import overlap_of, sums_early
from shardwise.runtime.placement import Placement, place
from shardwise.runtime.reducer import BUCKET_BYTES, Reducer
from shardwise.runtime.rules import Surroundings
from shardwise.runtime.session import init as join
from shardwise.runtime.store import Store, fill_boxes
from shardwise.training.feeds import Need, input_tensors, needs_of, parts_feed, whole_feed
from shardwise.training.given import Model, check_samples, made, shared_out
from shardwise.training.inference import Inference
from shardwise.training.loss_graph import Loss, loss_graph
from shardwise.training.memory_order import agreed_order, movable, store_alike
from shardwise.training.moved import moved
from shardwise.training.nodes import ranks_per_node
from shardwise.training.optimizers import check_optimizer, sliced
from shardwise.training.plain_numbers import check_numbers, numbers_in
from shardwise.training.stage_cuts import stage_cuts
from shardwise.training.unsplit import call_model
from shardwise.training.whole_model import check_whole, is_whole, network_of, share_buffers
from shardwise.training.whole_state import WholeState

if TYPE_CHECKING:
    from shardwise.oracle import Prediction
    from shardwise.training.compare import Measured

Optimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
Shapes = tuple[tuple[int, ...], ...]


class Trainer:
    """Train a model split over the ranks of the job, with the numbers of one device.

    Args:
        model: any module, whose parameters are trained in place where a rank holds them whole; or a
            callable that makes one, or a module on meta: then each rank has only its own stage and slice.
        example: inputs and targets of one mini-batch, `(x, y)`; sizes may differ from step to step.
        plan: how to split it, as a `Plan` or its one line.
        loss: a callable `(output, target) -> scalar`.
        optimizer: a callable that makes an optimizer from (name, parameter) pairs.
        seed: what dropout masks and first values of a model without data start from, under every plan.
        loss_mean: `exact`, or `micro-batch` to accept, for a loss that is no mean over samples, the mean of
            the losses of the micro-batches.
        clip_norm: clip gradients to this global norm before each update.
        accumulate: how many steps make one update; their gradients are averaged.
        init: fills a whole tensor in place, given its name, for a model without data.
        input_gradients: whether `input_gradients()` is wanted after each step.
        bucket_bytes: how much of the gradients is summed over ranks at a time.
        record: whether to keep `events`, what this rank did when.
        overlap: what is computed while messages between tiles travel: `off`, `backward` (weight gradients),
            `both` (also the interiors of tiles), or `auto`: what pays on the device.
        memory_order: how images lie in memory, `first` or `last` for their channels; `auto` is what convolves
            faster here, unless `SHARDWISE_MEMORY_ORDER` names one. With `last` kernels of the model change
            their strides, never their values; name an order where runs must repeat to the last bit.
        memory_limit: bytes that a rank may hold; stages that `plan.cuts` does not name keep within it by
            estimate. By default each rank's share of its node, and a note says where that is not enough.
    """

    def __init__(
        self,
        model: Model,
        example: tuple[Any, Any],
        plan: Plan | str = "data=1",
        *,
        loss: Loss,
        optimizer: Optimizer | None = None,
        seed: int = 0,
        loss_mean: str = "exact",
        clip_norm: float | None = None,
        accumulate: int = 1,
        init: Init | None = None,
        input_gradients: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        record: bool = False,
        overlap: str = "auto",
        memory_order: str = "auto",
        memory_limit: float | None = None,
    ) -> None:
        self.session = join()
        self.device = self.session.device
        self.plan, self.loss, self.seed = Plan.parse(plan), loss, seed
        self.model = made(model)
        self.clip_norm, self.accumulate = clip_norm, accumulate
        if accumulate < 1:
            raise ValueError(f"accumulate: found {accumulate}; expected at least 1")
        self.input_example, target = example
        self._numbers = {"x": numbers_in(self.input_example), "y": numbers_in(target)}
        self.network: Graph = network_of(self.model, self.input_example, training=True)
        check_whole(self.network, self.model, self.plan)
        ending = loss_graph(loss, self.network.output_specs, target)
        ending, self._sums = shared_out(ending, self.plan, loss_mean)
        self.graph: Graph = attach(self.network, ending)
        check_samples(self.graph, self.plan)
        self.notes = check(self.plan, self.graph, self.session.size, self.graph.batch)
        self.notes += self.network.notes if is_whole(self.network) else ()
        self.fabric = Fabric(mesh_of(self.plan, ranks_per_node(self.session)))
        self.recorder = Recorder(record)
        self._wants_input_gradients = input_gradients
        self._lowered: dict[Shapes, Lowered] = {}
        self._engines: dict[Shapes, Engine] = {}
        self.cuts, more = stage_cuts(self._example_graph(), self.plan, self.session, memory_limit)
        self.notes += more
        self.store = Store(self.device)
        self.placement = self._place()
        self.peak_parameter_bytes = self._fill(init)
        self.is_plain = self._alone()
        self.order = self._order(memory_order)
        self.bench = Bench(
            self.fabric,
            self.store,
            self.device,
            self._reducer(bucket_bytes),
            Surroundings(self._modules(), seed),
            self.recorder,
            overlap_of(overlap, self.device),
            self.order,
        )
        self.inference, self.whole_state = Inference(self), WholeState(self)
        trained = list(self.store.named_parameters())
        self.optimizer = optimizer(trained) if optimizer is not None and trained else None
        if self.optimizer is not None:
            check_optimizer(self.optimizer, sliced(self.placement, self.graph.frozen))
        self.step_seconds: list[float] = []
        self.prediction: Prediction | None = None
        self.measured: Measured | None = None
        self.gradient_norm: float | None = None
        self._last: Engine | None = None
        self._pending = 0

    # Preparation.

    def _modules(self) -> dict[str, nn.Module]:
        modules = dict(self.model.named_modules())
        if isinstance(self.loss, nn.Module):
            modules |= {f"loss.{name}": module for name, module in self.loss.named_modules()}
        return modules

    def _state(self) -> dict[str, Tensor]:
        """Return the user's own tensors by name, those of the loss too."""
        state: dict[str, Tensor] = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        state |= dict(self.graph.constants)
        if isinstance(self.loss, nn.Module):
            prefixed = {**dict(self.loss.named_parameters()), **dict(self.loss.named_buffers())}
            state |= {f"loss.{name}": tensor for name, tensor in prefixed.items()}
        return state

    def _example_graph(self) -> Graph:
        """Return the network of a mini-batch with samples in every share.

        What ranks hold must not depend on a share of the example that happens to be empty.
        """
        shares = self.plan.data * micro_batches_of(self.plan)
        return self.graph.with_batch(max(self.graph.batch, shares))

    def _place(self) -> Placement:
        return place(self._lower(self._example_graph().shapes), self.fabric.mesh)

    def _fill(self, init: Init | None) -> int:
        """Take this rank's state in; return the peak of parameter bytes."""
        rank = self.fabric.rank
        boxes = {name: held[rank] for name, held in self.placement.held.items() if rank in held}
        if not on_meta(self.model):
            fill_boxes(self.store, boxes, self._state())
            return self.store.parameter_bytes
        state = self._state()
        inside = {name: box for name, box in boxes.items() if state[name].device.type == "meta"}
        fill_boxes(self.store, {name: box for name, box in boxes.items() if name not in inside}, state)
        return materialise(self.store, self.model, inside, self.seed, init)

    def _reducer(self, bucket_bytes: int) -> Reducer | None:
        self.fabric.adopt(self.placement.sets(), apart=True)
        wires = {}
        for name in self.store.parameters:
            box = self.store.boxes[name]
            ranks = self.placement.sharers(name, box)
            if len(ranks) > 1 and not box.empty:
                wires[name] = self.fabric.wire(ranks, apart=True)
        if self.fabric.size == 1:
            return None
        early = sums_early(self.session)
        return Reducer(self.store.parameters, wires, self.placement.order, bucket_bytes, self.recorder, early)

    def _order(self, name: str) -> Order:
        """Agree on the order of images in memory, and store kernels alike on all ranks."""
        # Others than torch may see the memory of their weights by other names.
        if self.is_plain or isinstance(self.model, Foreign):
            return FIRST
        lowered = self._lower(self._example_graph().shapes)
        programs = [lowered.stage(s, 0, 0) for s in range(self.fabric.mesh.stages)]
        order = agreed_order(name, self.graph, self.fabric, self.device)
        for program in programs:
            order.settle(program.ops, movable(self.store, self._state()), program.width)
        store_alike(self.store, self.fabric, sorted(self.placement.held))
        return order

    def _alone(self) -> bool:
        """Tell whether one process can simply call the model: nothing is split or copied, no mask counted."""
        counted = any(layer.kind in (Kind.DROPOUT, Kind.OTHER) for layer in self.graph)
        counted = (counted and not is_whole(self.network)) or isinstance(self.model, Foreign)
        alone = self.fabric.size == 1 and micro_batches_of(self.plan) == 1
        simple = self.plan.batch_norm != "deferred" and not self._wants_input_gradients
        # What lives elsewhere was copied to the device, and the optimizer has the copies.
        here = all(tensor.device == self.device for tensor in self._state().values())
        return alone and simple and here and not counted and not self.recorder.on

    def _lower(self, shapes: Shapes) -> Lowered:
        if shapes not in self._lowered:
            graph = self.graph.at(*shapes)
            gradients = self._wants_input_gradients
            self._lowered[shapes] = lower(graph, self.plan, self.cuts, input_gradients=gradients)
        return self._lowered[shapes]

    def engine(self, shapes: Shapes) -> Engine:
        """Return what runs steps of these input and target shapes; collective when they are new."""
        if shapes not in self._engines:
            self._engines[shapes] = Engine(self._lower(shapes), self.bench)
        return self._engines[shapes]

    # Training.

    def step(self, x: Any, y: Any) -> float:
        """Train on one global mini-batch, the same on every rank; return the global mean loss."""
        if self.is_plain:
            return self._plain_step(x, y)
        for field, tree in (("x", x), ("y", y)):
            check_numbers(field, tree, self._numbers[field])
        tensors = [*input_tensors(self.model, x), *(t for t in leaves(y) if isinstance(t, Tensor))]
        shapes = tuple(tuple(t.shape) for t in tensors)
        return self.run(shapes, whole_feed(self.graph, tensors))

    def step_local(self, shapes: Sequence[Sequence[int]], parts: Sequence[Tensor]) -> float:
        """Train on one mini-batch of which this rank has only what it needs.

        Args:
            shapes: the global shapes of all inputs and targets, in order.
            parts: one tensor for each entry of `needs(shapes)`, in its order.
        """
        sizes = tuple(tuple(shape) for shape in shapes)
        return self.run(sizes, parts_feed(self.needs(sizes), parts))

    def needs(self, shapes: Sequence[Sequence[int]]) -> list[Need]:
        """Return which boxes of the inputs and targets this rank reads in a step of these global shapes."""
        return needs_of(self.engine(tuple(tuple(shape) for shape in shapes)))

    def run(self, shapes: Shapes, feed: Feed) -> float:
        """Train on what `feed` gives; return the global mean loss."""
        engine = self.engine(shapes)
        updates = self._begin()
        start = time.perf_counter()
        if not self.model.training:
            self.model.train()
        loss = engine.step(
            feed,
            self._update if updates else None,
            reduce=updates,
            weight=1.0 / self.accumulate,
            sums=self._sums,
        )
        self.fabric.world.all_reduce(loss)
        if is_whole(self.network):
            share_buffers(self.model, self.fabric)
        self.bench.surroundings.step += 1
        self._last = engine
        self.step_seconds.append(time.perf_counter() - start)
        return float(loss)

    def _begin(self) -> bool:
        """Clear the gradients of the last update; tell whether this step ends in the next."""
        if self._pending == 0:
            for parameter in self.store.parameters.values():
                parameter.grad = None
        self._pending = (self._pending + 1) % self.accumulate
        return self._pending == 0

    def _update(self) -> None:
        if self.clip_norm is not None:
            self.gradient_norm = clip_gradients(
                self.store.parameters, self.fabric, self.placement, self.clip_norm
            )
        if self.optimizer is not None:
            self.optimizer.step()

    def _plain_step(self, x: Any, y: Any) -> float:
        updates = self._begin()
        start = time.perf_counter()
        if not self.model.training:
            self.model.train()
        x, y = moved((x, y), self.device)
        value: Tensor = self.loss(call_model(self.model, x), y)
        (value if self.accumulate == 1 else value / self.accumulate).backward()  # type: ignore[no-untyped-call]
        if updates:
            self._update()
        result = float(value.detach())
        self.step_seconds.append(time.perf_counter() - start)
        return result

    # What training made.

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients of the last step as whole tensors by the user's names, on every rank."""
        grads = {name: p.grad for name, p in self.store.parameters.items()}
        return self.whole_state.whole(self.graph.parameters, grads)

    def state_dict(self) -> dict[str, Tensor]:
        """Return parameters and buffers as whole tensors by the user's names, on every rank."""
        return self.whole_state.state_dict()

    def stream_state(self) -> Iterator[tuple[str, Tensor | None]]:
        """Yield (name, whole tensor) one after another on rank 0, and (name, None) on all other ranks.

        Only one tensor is whole at a time, so it serves models that fit no rank. Every rank must iterate.
        """
        return self.whole_state.to_first_rank()

    def write_back(self, names: Iterable[str] | None = None) -> None:
        """Put the trained weights into the user's model on every rank, unless it has no data of its own."""
        self.whole_state.write_back(names)

    def input_gradients(self) -> list[Tensor]:
        """Return the gradients of the model's inputs in the last step, whole on every rank."""
        if self._last is None:
            raise ValueError("input_gradients: there was no step yet")
        result = []
        for layer in self._last.lowered.graph.inputs[: len(self.network.inputs)]:
            if layer.spec.is_float:
                grad = torch.zeros(layer.shape, dtype=getattr(torch, layer.spec.dtype), device=self.device)
                grad += self._last.input_grads.get(layer.name, 0)
                self.fabric.world.all_reduce(grad)
                result.append(grad)
        return result

    @property
    def events(self) -> list[Event]:
        """Return what this rank did when, if `record` was asked for."""
        return self.recorder.events

    # Evaluation and files.

    def predict(self, x: Any) -> Any:
        """Return the model's outputs in evaluation for a global batch of any size, whole on every rank."""
        return self.inference.predict(x)

    def evaluate(self, batches: Iterable[tuple[Any, Any]], metrics: Any = None) -> dict[str, float]:
        """Return the mean loss and metrics in evaluation over batches `(x, y)`, the same on every rank."""
        return self.inference.evaluate(batches, metrics)

    def save(self, path: str | Path) -> None:
        """Save weights, optimizer and plan into a folder; collective over the world."""
        save_state(Path(path), self.store, self.placement, self.fabric, self.optimizer, self.plan)

    def load(self, path: str | Path) -> None:
        """Load what `save` wrote under the same plan; collective over the world."""
        load_state(Path(path), self.store, self.placement, self.fabric, self.optimizer, self.plan)
