"""The captured network: an ordered list of layers for given input shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardwise.graph.batches import ENOUGH, FEWEST, Batches, batches_of
from shardwise.graph.layer import Kind, Layer, TensorSpec

if TYPE_CHECKING:
    from shardwise.graph.coverage import Coverage

Shapes = tuple[tuple[int, ...], ...]
_MOST_OTHERS = 16


@dataclass(frozen=True)
class Graph:
    """A network as layers in an order in which they can be computed, for given input shapes.

    Args:
        layers: inputs first come as layers of kind INPUT; every layer reads only earlier ones.
        outputs: what the model returns: layer names in the structure of the user's own return value.
        parameters, buffers: specs by their `state_dict` name.
        training: whether this is the behaviour in training or in evaluation.
        tied: other names of a parameter -> the name used in `parameters`.
        frozen: parameters that do not require gradients.
        source: how it was captured ("fx", "export" or "keras").
        constants: tensors that the model's code holds outside of its parameters and buffers; their specs
            are among `buffers` too, under the same names.
        notes: what the capture has to say to its reader, e.g. that the self-check was skipped.
        rebuild: makes this graph for other input shapes, from the same capture.
    """

    layers: tuple[Layer, ...]
    outputs: Any
    parameters: Mapping[str, TensorSpec]
    buffers: Mapping[str, TensorSpec]
    training: bool = True
    tied: Mapping[str, str] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    source: str = "fx"
    constants: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    notes: tuple[str, ...] = ()
    rebuild: Callable[[Shapes], Graph] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def by_name(self) -> Mapping[str, Layer]:
        """Return the layers by name."""
        return {layer.name: layer for layer in self.layers}

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Return the position of each layer in the order."""
        return {layer.name: i for i, layer in enumerate(self.layers)}

    @cached_property
    def readers(self) -> Mapping[str, tuple[str, ...]]:
        """Return for each layer the names of the layers that read its value."""
        result: dict[str, list[str]] = {layer.name: [] for layer in self.layers}
        for layer in self.layers:
            for source in dict.fromkeys(layer.inputs):
                result[source].append(layer.name)
        return {name: tuple(readers) for name, readers in result.items()}

    @cached_property
    def inputs(self) -> tuple[Layer, ...]:
        """Return the layers that stand for the model's inputs, in the order of its arguments."""
        return tuple(layer for layer in self.layers if layer.kind is Kind.INPUT)

    @cached_property
    def shapes(self) -> Shapes:
        """Return the input shapes that this graph is for."""
        return tuple(layer.shape for layer in self.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Return the names of the layers whose values the model returns, flattened."""
        return tuple(_leaves(self.outputs))

    @property
    def output_specs(self) -> Any:
        """Return shape and dtype of what the model returns, in its structure."""
        return _mapped(self.outputs, lambda name: self[name].spec)

    @property
    def batch(self) -> int:
        """Return the number of samples that this graph is for."""
        return self.shapes[0][0]

    def __getstate__(self) -> dict[str, Any]:
        # What makes other graphs quickly cannot be pickled, and is soon found again.
        return {name: value for name, value in self.__dict__.items() if name != "batches"}

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, name: str) -> Layer:
        return self.by_name[name]

    @cached_property
    def saved_bytes(self) -> int:
        """Return what autograd keeps for the backward pass on one device, shared memory counted once."""
        owner: dict[str, str] = {}
        named: dict[str, int] = {}
        unnamed = 0
        for layer in self.layers:
            owner[layer.name] = owner[layer.alias] if layer.alias else layer.name
            bytes_of = {o.source: o.spec.nbytes for o in layer.operands if o.source in layer.saves}
            # Its own results may have readers' names: a nested result has one layer per tensor.
            for name in layer.saves:
                if name in self.by_name and name not in bytes_of:
                    bytes_of[name] = self.by_name[name].spec.nbytes
            unnamed += layer.saved_bytes - sum(bytes_of.values())
            for name in bytes_of:
                holder = self.by_name[owner.get(name, name)]
                named[holder.name] = holder.spec.nbytes
        return unnamed + sum(named.values())

    def table(self) -> str:
        """Return the layers as a table to read, with totals."""
        from shardwise.graph.table import graph_table

        return graph_table(self)

    def coverage(self) -> Coverage:
        """Say for each layer which splits are possible, and why not."""
        from shardwise.graph.coverage import coverage

        return coverage(self)

    def at(self, *shapes: Sequence[int]) -> Graph:
        """Return the graph of the same network for other input shapes, without a new capture."""
        wanted = tuple(tuple(s) for s in shapes)
        if wanted == self.shapes:
            return self
        if self.rebuild is None:
            raise ValueError("this graph was made by hand: it has no capture to recompute its shapes from")
        if len(wanted) != len(self.shapes):
            raise ValueError(f"Graph.at: the model has {len(self.shapes)} inputs, {len(wanted)} shapes given")
        rebuild = self.rebuild
        return self._kept(wanted, lambda: rebuild(wanted))

    def _kept(self, shapes: Shapes, make: Callable[[], Graph]) -> Graph:
        if shapes not in self._others:
            if len(self._others) == _MOST_OTHERS:
                del self._others[next(iter(self._others))]
            self._others[shapes] = make()
        return self._others[shapes]

    @cached_property
    def _others(self) -> dict[Shapes, Graph]:
        """Return the graphs for other shapes that were asked for last: micro-batches ask again and again."""
        return {}

    def with_batch(self, batch: int) -> Graph:
        """Return the graph for another number of samples in every input."""
        shapes = tuple((batch, *shape[1:]) for shape in self.shapes)
        if batch < FEWEST or shapes == self.shapes or shapes in self._others:
            return self.at(*shapes)
        ready = "batches" in self.__dict__ or len(self._followed()) >= ENOUGH
        batches = self.batches if ready else None
        return self.at(*shapes) if batches is None else self._kept(shapes, lambda: batches.at(batch))

    @cached_property
    def batches(self) -> Batches | None:
        """Return what makes the graphs for other numbers of samples quickly, if anything can.

        It is found by the way when the network was followed for two other numbers. Whoever does not want to
        wait for that looks at it first.
        """
        if self.rebuild is None or not self.inputs:
            return None
        return batches_of(
            self, lambda batch: self.at(*((batch, *shape[1:]) for shape in self.shapes)), self._followed()
        )

    def _followed(self) -> list[int]:
        """Return the numbers of samples for which the network was followed, this one included."""
        rest = [shape[1:] for shape in self.shapes]
        others = [shapes[0][0] for shapes in self._others if [shape[1:] for shape in shapes] == rest]
        return [batch for batch in (self.batch, *others) if batch >= FEWEST]


def _leaves(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _leaves(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from _leaves(value)


def _mapped(tree: Any, function: Callable[[str], Any]) -> Any:
    if isinstance(tree, str):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: _mapped(value, function) for key, value in tree.items()}
    return type(tree)(_mapped(value, function) for value in tree)
