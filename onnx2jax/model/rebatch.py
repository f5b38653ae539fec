"""Batch sizes that an exporter wrote into constants: found, explained and repaired, ``convert(..., rebatch=True)``.

The graph is evaluated abstractly at two batch sizes side by side. Where the batch should pass and does not, a constant
holds its size: that node is repaired, or the model refused. Afterwards the repaired model is run on three batches at
once and compared with the original on each of them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import jax
import numpy as np

from .. import compat
from ..errors import KnownValueError, OperatorError, RebatchError
from ..ir import analysis
from ..ir.graph import Graph, Imported, Node
from ..ops.arrays import dims, is_known, shape_vector, xp
from ..ops.registry import Operator, Shaped, Static
from ..proto.types import Dim, TensorType, ValueInfo
from ..runtime.evaluate import Context, evaluate, run_nodes
from .rebatch_check import TIMES, Place, compare, drawn, part

TRIALS: Final = (64, 32, 16, 128, 224, 7)
"""Extents tried for dimensions that are free and not overridden."""
PRIVATE: Final = "onnx2jax.rebatch"


def patched(shape: Static, like: Shaped, *, place: int, axis: int, per: int) -> Any:
    """A known shape, one extent multiplied by how many batches of ``per`` are in ``like``."""
    extents = list(dims(shape))
    extents[place] *= like.shape[axis] // per
    return shape_vector(tuple(extents))


def repeated(value: Any, like: Shaped, *, axis: int, like_axis: int, per: int) -> Any:
    """A value for a batch of ``per`` as often as the batch of ``like`` holds such."""
    counts = [1] * value.ndim
    counts[axis] = like.shape[like_axis] // per
    return xp(value).tile(value, counts)


PATCHED: Final = Operator(
    *(PRIVATE, "Patched", 1, patched, ("shape", "like"), None, frozenset({"place", "axis", "per"})),
    static=frozenset({"shape"}),
    shaped=frozenset({"like"}),
)
REPEATED: Final = Operator(
    *(PRIVATE, "Repeated", 1, repeated, ("value", "like"), None, frozenset({"axis", "like_axis", "per"})),
    shaped=frozenset({"like"}),
)


def rebatched(
    imported: Imported,
    rebatch: bool | Mapping[str, int],
    dim_overrides: Mapping[str, int],
    static: Mapping[str, Any],
) -> tuple[Imported, tuple[str, ...]]:
    """The model for any batch size, and what was changed for it; the arguments are those of ``convert``.

    Raises:
        RebatchError: it cannot be done, or not be shown to be right.
    """
    graph = imported.graph
    inputs = [v for v in graph.inputs if v.name not in graph.initializers and v.name not in static]
    axes = _axes(inputs, rebatch)
    declared = {v.name: v for v in inputs}
    fixed = [d for n, axis in axes.items() if isinstance(d := _shape(declared[n])[axis], int)]
    if len(set(fixed)) > 1:
        raise RebatchError(f"the batch has different extents in the inputs: {', '.join(map(str, inputs))}")
    search = _started(graph, inputs, axes, tuple(fixed[:1]) or (2, 1), dim_overrides, static)
    repaired = search.repaired()
    places = {n: Place(axis) for n, axis in axes.items()}
    values = drawn(search.inputs_of(TIMES))
    with compat.enable_x64():
        run = functools.partial(jax.jit(search.run, static_argnums=0), params=search.params)
        together = run(repaired, values)
        apart = [run(graph, {n: part(v, places.get(n), i) for n, v in values.items()}) for i in range(TIMES)]
    compare(together, apart, [search.places.get(v.name) for v in graph.outputs], search.changes)
    variables = [d for v in inputs for d in _shape(v) if isinstance(d, str)]
    first = next((d for n, axis in axes.items() if isinstance(d := _shape(declared[n])[axis], str)), None)
    name = first or next(n for n in ("batch", *(f"batch_{i}" for i in range(len(variables)))) if n not in variables)
    repaired = replace(
        repaired,
        inputs=tuple(_free(v, axes.get(v.name), name) for v in repaired.inputs),
        outputs=tuple(_free(v, *search.axis_of(v.name, name)) for v in repaired.outputs),
    )
    return replace(imported, graph=repaired), tuple(search.changes)


def _axes(inputs: list[ValueInfo], rebatch: bool | Mapping[str, int]) -> dict[str, int]:
    """The axis of the batch in each input that has it."""
    shapes = {v.name: _shape(v) for v in inputs}
    if isinstance(rebatch, Mapping):
        for name, axis in rebatch.items():
            if not -len(shapes.get(name, ())) <= axis < len(shapes.get(name, ())):
                raise RebatchError(f"rebatch has {name!r}: {axis}; the inputs are {', '.join(map(str, inputs))}")
        return {n: axis % len(shapes[n]) for n, axis in rebatch.items()}
    ranked = {n: s for n, s in shapes.items() if s}
    if len({s[0] if isinstance(s[0], int) else None for s in ranked.values()}) != 1:
        raise RebatchError(
            f"which axes are the batch? The first axes of the inputs differ: {', '.join(map(str, inputs))}. Name them: "
            "convert(..., rebatch={'input name': axis}); inputs left out are the same for the whole batch"
        )
    return dict.fromkeys(ranked, 0)


def _shape(value: ValueInfo) -> tuple[Dim, ...]:
    if not isinstance(value.type, TensorType) or value.type.shape is None:
        raise RebatchError(f"input {value} has no declared rank, so its batch axis is unknown")
    return value.type.shape


def _free(value: ValueInfo, axis: int | None, name: str | None) -> ValueInfo:
    """The declaration with a variable, or nothing known, where the batch is."""
    if axis is None or not isinstance(value.type, TensorType) or value.type.shape is None:
        return value
    kept = (str,) if name else ()  # variables that the model has already
    shape = tuple(name if i == axis and not isinstance(d, kept) else d for i, d in enumerate(value.type.shape))
    return replace(value, type=replace(value.type, shape=shape))


def _started(
    graph: Graph,
    inputs: list[ValueInfo],
    axes: dict[str, int],
    sizes: tuple[int, ...],
    dim_overrides: Mapping[str, int],
    static: Mapping[str, Any],
) -> _Search:
    """A search at the first batch size at which the model runs. 1 comes last: it is what other axes have too."""
    for size in sizes:
        for trial in TRIALS:
            search = _Search(graph, inputs, axes, size, trial, dim_overrides, static)
            try:
                jax.eval_shape(functools.partial(search.run, graph), search.inputs_of(1), search.params)
                return search
            except OperatorError as e:
                error = e
            except KnownValueError as e:
                raise RebatchError(f"the model cannot be compiled as one program: {e}") from e
            if not search.open:
                break
    raise RebatchError(
        f"the model does not run at batch size {sizes[-1]} with {list(TRIALS)} for its free dimensions; give extents "
        "that it takes: convert(..., dim_overrides={'name': n}, rebatch=True)"
    ) from error


class _Search:
    """One graph at two batch sizes, node by node."""

    def __init__(
        self,
        graph: Graph,
        inputs: list[ValueInfo],
        axes: dict[str, int],
        size: int,
        trial: int,
        dim_overrides: Mapping[str, int],
        static: Mapping[str, Any],
    ) -> None:
        self.graph, self.inputs, self.axes, self.size = graph, inputs, axes, size
        self.static = {n: np.asarray(v) for n, v in static.items()}
        self.params = analysis.parameters(graph)
        self.changes: list[str] = []
        self.places: dict[str, Place] = {}
        self.nodes: list[Node] = []
        self.constants: dict[str, np.ndarray] = {}
        free = {d for v in inputs for i, d in enumerate(_shape(v)) if i != axes.get(v.name) and not isinstance(d, int)}
        self.open = bool(free - dim_overrides.keys())
        """Whether extents besides the batch may vary."""
        self.trial, self.overrides = trial, dim_overrides

    def inputs_of(self, times: int) -> dict[str, jax.ShapeDtypeStruct]:
        shapes = {}
        for value in self.inputs:
            assert isinstance(value.type, TensorType)
            extents = [
                self.size * times
                if i == self.axes.get(value.name)
                else (d if isinstance(d, int) else self.overrides.get(d or "", self.trial))
                for i, d in enumerate(_shape(value))
            ]
            shapes[value.name] = jax.ShapeDtypeStruct(extents, value.type.dtype)
        return shapes

    def run(self, graph: Graph, values: Mapping[str, Any], params: Mapping[str, Any]) -> tuple[Any, ...]:
        """The outputs of a graph."""
        with compat.enable_x64(), np.errstate(all="ignore"):
            return evaluate(graph, {**values, **self.static}, Context(params, jax.random.key(0)))

    def repaired(self) -> Graph:
        """The graph with its repairs."""
        with compat.enable_x64(), np.errstate(all="ignore"):
            jax.eval_shape(self._walk, self.inputs_of(1), self.inputs_of(TIMES), self.params)
        return replace(self.graph, nodes=tuple(self.nodes), initializers={**self.graph.initializers, **self.constants})

    def _walk(self, one: dict[str, Any], many: dict[str, Any], params: dict[str, Any]) -> tuple[()]:
        self.context = Context(params, jax.random.key(0))
        constants = {n: params.get(self.graph.key(n), v) for n, v in self.graph.initializers.items()}
        self.one, self.many = ({**constants, **values, **self.static} for values in (one, many))
        self.places.update((n, Place(axis)) for n, axis in self.axes.items())
        for node in self.graph.nodes:
            run_nodes((node,), self.one, self.context)
            for attempt in (self._as_it_is, self._reshaped, self._expanded, self._sliced, self._with_repeated):
                self.note = ""
                found = attempt(node)
                if found and self._follows(node, found):
                    self.nodes += found
                    self.changes += [self.note] if self.note else []
                    break
            else:
                raise RebatchError(self._refusal(node))
        return ()

    def _follows(self, node: Node, nodes: list[Node]) -> bool:
        """Whether nodes in the place of one pass the batch on; if so, their values are kept."""
        scope = dict(self.many)
        try:
            run_nodes(nodes, scope, self.context)
        except OperatorError:
            return False
        batched = any(n in self.places for n in node.reads)
        found: dict[str, Place] = {}
        for name in filter(None, node.outputs):
            before, after = self.one[name], scope[name]
            if not (hasattr(before, "shape") and hasattr(after, "shape")) or before.ndim != after.ndim:
                return False
            differing = [i for i, (a, b) in enumerate(zip(before.shape, after.shape, strict=True)) if a != b]
            if not differing:
                if batched and not is_known(before) and not self._shape_only(node):
                    return False
                continue
            (axis,) = differing if len(differing) == 1 else (-1,)
            if axis < 0 or before.shape[axis] * TIMES != after.shape[axis]:
                return False
            found[name] = self._placed(node, before.shape, axis)
        self.many = scope
        self.places.update(found)
        return True

    def _shape_only(self, node: Node) -> bool:
        """Whether a node reads nothing of the batch but its shape."""
        target = node.target
        return isinstance(target, Operator) and all(
            name not in self.places or target.parameter(i) in target.shaped for i, name in enumerate(node.inputs)
        )

    def _placed(self, node: Node, shape: tuple[int, ...], axis: int) -> Place:
        if shape[axis] == self.size:
            return Place(axis)
        known = [self.places[n] for n in node.inputs if n in self.places]
        if node.op_type in ("Reshape", "Flatten") and not node.domain and known:
            outer = self._outer(node.inputs[0])
            return Place(axis, max(1, outer // math.prod(shape[:axis])))
        return Place(axis, known[0].blocks if known else 1)

    def _outer(self, name: str) -> int:
        """How many values lie outside the batch in the order of memory."""
        place = self.places[name]
        return math.prod(self.one[name].shape[: place.axis]) * place.blocks

    def _as_it_is(self, node: Node) -> list[Node]:
        """The node, unless it is a Reshape whose constant has the size of the batch at its place."""
        return [] if self._baked(node) is not None else [node]

    def _baked(self, node: Node) -> tuple[int, np.ndarray] | None:
        """The place of the batch in the constant of a Reshape that does not follow it, and the constant."""
        if (node.domain, node.op_type) != ("", "Reshape") or node.inputs[0] not in self.places:
            return None
        target = self._vector(node, 1, "shape")
        if target is None or (len(node.inputs) > 1 and not np.array_equal(target, self.many[node.inputs[1]])):
            return None
        place, outer = self.places[node.inputs[0]], self._outer(node.inputs[0])
        source, shape = self.one[node.inputs[0]].shape, self.one[node.outputs[0]].shape
        before = [(math.prod(shape[:i]), d) for i, d in enumerate(shape)]
        found = [i for i, (n, d) in enumerate(before) if d == self.size and n == outer]
        if place.axis in found:
            found = [place.axis]
        if not found:
            fits = (d % self.size == 0 and outer % n == 0 and d >= outer // n * self.size for n, d in before)
            found = [i for i, ok in enumerate(fits) if ok]
            # Merged with the axis behind it (heads of attention), or, where axes become fewer, with that before it.
            behind = [i for i in found if before[i][0] == outer and len(shape) >= len(source)]
            found = behind or found
        if not found or target[found[0]] == -1 or (target[found[0]] == 0 and not node.attributes.get("allowzero")):
            return None
        return found[0], target

    def _vector(self, node: Node, position: int, attribute: str) -> np.ndarray | None:
        """A vector of a node that is known, from an input or, in old opsets, an attribute."""
        if len(node.inputs) > position and node.inputs[position]:
            value = self.one[node.inputs[position]]
            return value if isinstance(value, np.ndarray) else None
        value = node.attributes.get(attribute)
        return None if value is None else np.asarray(value, np.int64)

    def _with_vector(self, node: Node, position: int, attribute: str, place: int, new: int) -> list[Node]:
        """The node with another number in its vector, which becomes a constant of the graph."""
        before = self._vector(node, position, attribute)
        assert before is not None
        after = before.copy()
        after[place] = new
        self.note = f"{node}: {attribute} {before.tolist()} becomes {after.tolist()}"
        if len(node.inputs) <= position:
            return [replace(node, attributes={**node.attributes, attribute: tuple(after.tolist())})]
        name = self._constant(node, attribute, after)
        return [replace(node, inputs=(*node.inputs[:position], name, *node.inputs[position + 1 :]))]

    def _constant(self, node: Node, attribute: str, value: np.ndarray) -> str:
        name = f"{node.name}/{attribute}"
        self.constants[name] = self.one[name] = self.many[name] = value
        return name

    def _reshaped(self, node: Node) -> list[Node]:
        """A Reshape whose constant has the size of the batch, with the size of this call in its place."""
        baked = self._baked(node)
        if baked is None:
            return []
        place, target = baked
        like, axis = next(iter(self.axes.items()))
        shape = node.inputs[1] if len(node.inputs) > 1 else self._constant(node, "constant", target)
        name, extent = f"{node.name}/shape", self.one[node.outputs[0]].shape[place]
        self.note = f"{node}: shape {target.tolist()}, where {extent} at {place} becomes " + (
            "the batch size" if extent == self.size else f"{extent // self.size} times the batch size"
        )
        attributes = {"place": place, "axis": axis, "per": self.size}
        patch = Node(name, "Patched", PRIVATE, 1, (shape, like), (name,), attributes, PATCHED)
        rest = {k: v for k, v in node.attributes.items() if k != "shape"}
        return [patch, replace(node, inputs=(node.inputs[0], name), attributes=rest)]

    def _expanded(self, node: Node) -> list[Node]:
        if (node.domain, node.op_type) != ("", "Expand") or node.inputs[0] not in self.places:
            return []
        target, value = self._vector(node, 1, "shape"), self.one[node.inputs[0]]
        if target is None:
            return []
        place = self.places[node.inputs[0]].axis + len(target) - value.ndim
        return self._with_vector(node, 1, "shape", place, 1) if place >= 0 else []

    def _sliced(self, node: Node) -> list[Node]:
        """A Slice that takes the whole batch by its number."""
        if (node.domain, node.op_type) != ("", "Slice") or node.inputs[0] not in self.places:
            return []
        place, value = self.places[node.inputs[0]], self.one[node.inputs[0]]
        starts, ends, axes = (self._vector(node, i, n) for i, n in enumerate(("starts", "ends", "axes"), 1))
        if starts is None or ends is None or self._vector(node, 4, "steps") is not None:
            return []
        every = list(range(len(starts))) if axes is None else [a % value.ndim for a in axes.tolist()]
        if place.axis not in every:
            return []
        i = every.index(place.axis)
        if starts[i] != 0 or ends[i] != value.shape[place.axis]:
            return []
        return self._with_vector(node, 2, "ends", i, np.iinfo(ends.dtype).max)

    def _with_repeated(self, node: Node) -> list[Node]:
        """The node with operands for one batch (constants, initial states) repeated for as many as there are."""
        like = next((n for n in node.inputs if n in self.places), None)
        if like is None or self.one[like].shape[self.places[like].axis] != self.size:
            return []
        axis = self.places[like].axis
        new, inputs = [], list(node.inputs)
        for i, name in enumerate(node.inputs):
            value = self.one[name] if name and name not in self.places else None
            if value is None or not hasattr(value, "shape") or value.ndim != self.one[like].ndim:
                continue
            if value.shape[axis] == self.size:
                inputs[i] = f"{node.name}/{name}/repeated"
                attributes = {"axis": axis, "like_axis": axis, "per": self.size}
                new.append(Node(inputs[i], "Repeated", PRIVATE, 1, (name, like), (inputs[i],), attributes, REPEATED))
        if not new:
            return []
        self.note = f"{node}: {', '.join(repr(n.inputs[0]) for n in new)} repeated along axis {axis} for each batch"
        return [*new, replace(node, inputs=tuple(inputs))]

    def _refusal(self, node: Node) -> str:
        def shapes(scope: Mapping[str, Any]) -> str:
            return ", ".join(f"{n} {list(scope[n].shape)}" for n in node.inputs if hasattr(scope.get(n), "shape"))

        return (
            f"{node} ties the batch size to {self.size} in a way that cannot be repaired with certainty: its operands "
            f"are {shapes(self.one)} at {self.size} and {shapes(self.many)} at {self.size * TIMES}. Export the model "
            "with a dynamic batch axis, or run it sample by sample: jax.vmap over model.apply"
        )

    def axis_of(self, name: str, variable: str) -> tuple[int | None, str | None]:
        """The axis with the batch in a value, and the variable if nothing else is on that axis."""
        if name not in self.places:
            return None, None
        axis = self.places[name].axis
        return axis, variable if self.one[name].shape[axis] == self.size else None
