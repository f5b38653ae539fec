"""Low-rank adapters (LoRA): train a product of two thin matrices in parallel to a frozen weight.

    y = x W + (x A) scale B        A [in, rank] is initialised at random, B [rank, out] with zeros

The added path consists of standard ONNX nodes, so it is trained, run and saved like all others.
"""

from __future__ import annotations

import math
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import CheckpointError, InputNameError, InputShapeError, InputTypeError, TrainingFormError, nearest
from ..eval.values import to_host
from ..ir.casts import NARROWER
from ..ir.graph import Graph, Node
from ..model.changes.detours import Detour, InsertedNode, detoured, opset_of, with_detours
from ..model.model import Model
from ..proto.dtypes import to_code, to_dtype
from ..proto.mapped import load
from .checkpoint import opened

MICROSOFT: Final = "com.microsoft"
PRODUCTS: Final = {("", "MatMul"), ("", "Gemm")} | {(MICROSOFT, n) for n in ("FusedMatMul", "TransposeMatMul")}
CODES: Final = {(MICROSOFT, "MatMulBlockQuantizedFp4Weight"): 2, (MICROSOFT, "MatMulBlockQuantizedFp8Weight"): 1}
"""Products with a weight [out, in] of 4- or 8-bit floating numbers in blocks, and how many numbers a byte holds."""
PACKED: Final = {(MICROSOFT, "MatMulNBits"), (MICROSOFT, "MatMulBnb4"), *CODES}
"""Products with a packed weight [out, in], with extents from the attributes K and N, or from its bytes."""
QUANTIZERS: Final = {"DequantizeLinear", "QuantizeLinear"}
BETWEEN: Final = QUANTIZERS | {"Cast", "CastLike", "Identity", "Transpose"}
"""Operators allowed between a stored weight and its product."""
BY_HAND: Final = {"Mul", "Sub"}
"""Also allowed for an integer weight: ``Mul(Sub(Cast(w), zero_point), scale)``."""


@dataclass(frozen=True, eq=False)
class LinearMap:
    """A node that multiplies by a stored weight: ``y = factor * x W``, optionally with a bias.

    Attributes:
        name: the name of the stored weight.
        between: the nodes between the stored weight and W.
        shape: the shape of W, [in, out].
        transposed: whether the weight is stored as [out, in].
        dtype: the element type of x and y; None if no constant determines it.
    """

    node: Node
    name: str
    between: tuple[Node, ...]
    shape: tuple[int, int]
    transposed: bool
    dtype: np.dtype | None
    factor: float = 1.0

    @property
    def is_packed(self) -> bool:
        """Whether the weight is stored or used as integers, so that an adapter cannot be merged into it."""
        kinds = {n.op_type for n in self.between}
        return (self.node.domain, self.node.op_type) in PACKED or not kinds.isdisjoint(QUANTIZERS | BY_HAND)

    def matches(self, pattern: str) -> bool:
        return any(n == pattern or fnmatchcase(n, pattern) for n in (self.name, self.node.name))

    def __str__(self) -> str:
        return f"{self.name!r} {list(self.shape)} of {self.node}"


@dataclass(frozen=True, eq=False)
class Adapter:
    """A low-rank adapter of a linear map; ``a`` and ``b`` are the names of its parameters."""

    map: LinearMap
    rank: int
    scale: float

    @property
    def a(self) -> str:
        return f"{self.map.name}.lora_A"

    @property
    def b(self) -> str:
        return f"{self.map.name}.lora_B"

    @property
    def dtype(self) -> np.dtype:
        """The dtype of A and B: 16 bits are too few for optimizer steps."""
        return np.dtype(np.float64 if self.map.dtype == np.float64 else np.float32)

    def detour(self) -> Detour:
        """The added nodes, with zeros for A and B."""
        node, scale = self.map.node, f"{self.map.name}.lora_scale"
        (extent, out), value, x = self.map.shape, node.outputs[0], node.inputs[0]
        name = {step: f"{node.name}/lora/{step}" for step in ("base", "x", "down", "scaled", "up", "delta", "add")}
        steps = [
            InsertedNode(name["down"], "MatMul", (x, self.a)),
            InsertedNode(name["scaled"], "Mul", (name["down"], scale)),
            InsertedNode(name["up"], "MatMul", (name["scaled"], self.b)),
            InsertedNode(name["add"], "Add", (name["base"], name["up"]), value),
        ]
        if self.dtype != self.map.dtype:
            narrow = InsertedNode(name["delta"], "CastLike", (name["up"], name["base"]))
            if self.map.dtype is not None:
                narrow = InsertedNode(name["delta"], "Cast", (name["up"],), attributes={"to": to_code(self.map.dtype)})
            steps[0] = InsertedNode(name["down"], "MatMul", (name["x"], self.a))
            steps[3] = InsertedNode(name["add"], "Add", (name["base"], name["delta"]), value)
            steps.insert(3, narrow)
            steps.insert(0, InsertedNode(name["x"], "Cast", (x,), attributes={"to": to_code(self.dtype)}))
        constants = {
            self.a: np.zeros((extent, self.rank), self.dtype),
            self.b: np.zeros((self.rank, out), self.dtype),
            scale: np.array(self.scale, self.dtype),
        }
        return Detour(value, name["base"], tuple(steps), constants)

    def init(self, key: Any) -> dict[str, jax.Array]:
        """Initial values: A is uniform within +-1 / sqrt(in), B is zero."""
        (extent, out), rank = self.map.shape, self.rank
        key, bound = jax.random.fold_in(key, zlib.crc32(self.a.encode())), 1 / math.sqrt(extent)
        a = jax.random.uniform(key, (extent, rank), self.dtype, -bound, bound)
        return {self.a: a, self.b: jnp.zeros((rank, out), self.dtype)}

    def merged(self, weight: Any, a: Any, b: Any) -> np.ndarray:
        """The stored weight with the adapter merged, rounded once to its element type."""
        weight, a, b = (np.asarray(to_host(load(v))) for v in (weight, a, b))
        added = (a @ b) * self.scale / self.map.factor
        exact: np.ndarray = weight.astype(np.promote_types(self.dtype, weight.dtype))
        wide = exact + (added.T if self.map.transposed else added)
        return wide.astype(weight.dtype)


def adapters(
    graph: Graph,
    full: Graph,
    lora: int | Mapping[str, int] | None,
    alpha: float | None,
    dtype: np.dtype | None = None,
) -> tuple[Adapter, ...]:
    """The adapters that ``lora`` requests, in graph order; ``graph`` is the part of ``full`` that the loss needs.

    ``dtype`` is that in which the model computes.

    Raises:
        InputNameError: a pattern matches nothing.
        InputTypeError: not a rank, or a pattern matches no linear map.
        InputShapeError: a rank is below 1 or above an extent of the weight.
        TrainingFormError: another node reads the weight too, or it already has an adapter.
    """
    if lora is None:
        if alpha is not None:
            raise InputTypeError(f"lora_alpha is {alpha} without adapters to scale: finetune(..., lora=8)")
        return ()
    ranks = lora if isinstance(lora, Mapping) else {"*": lora}
    for pattern, rank in ranks.items() or [("", None)]:
        if isinstance(rank, bool) or not isinstance(rank, int | np.integer):
            raise InputTypeError(f"lora is {lora!r}; it must be a rank, or ranks by name pattern: {{'*q_proj*': 8}}")
        if rank < 1:
            raise InputShapeError(f"lora has rank {rank} for {pattern!r}; a rank is 1 or more")
    if alpha is not None and not (math.isfinite(alpha) and alpha > 0):
        raise InputTypeError(f"lora_alpha is {alpha}; it must be a number above 0")
    maps, found = list(linear_maps(graph)), dict[LinearMap, int]()
    if dtype in NARROWER:
        maps = [replace(m, dtype=dtype) if m.dtype is None or m.dtype in NARROWER[dtype] else m for m in maps]
    unsuitable = _unsuitable(full, maps)
    for pattern, rank in ranks.items():
        for linear in _matching(full, maps, unsuitable, pattern):
            found.setdefault(linear, int(rank))
    for linear, rank in found.items():
        if rank > min(linear.shape):
            raise InputShapeError(
                f"lora has rank {rank} for {linear}, more than its extents; set a smaller one by a pattern that "
                f"matches first: lora={{{linear.name!r}: {min(linear.shape)}, '*': {rank}}}"
            )
    return tuple(Adapter(m, found[m], 1.0 if alpha is None else alpha / found[m]) for m in maps if m in found)


def linear_maps(graph: Graph) -> Iterator[LinearMap]:
    """The products with a stored matrix in the main graph."""
    nodes, constants = graph.nodes, graph.initializers
    producers = {v: n for n in nodes for v in n.outputs}
    for node in nodes:
        operator = node.domain, node.op_type
        if operator not in PRODUCTS | PACKED or node.inputs[0] in constants:
            continue
        name, between = _stored_weight(node.inputs[1], producers, constants)
        if name in constants:
            packed = operator in PACKED
            found = _packed_map(node, name, constants) if packed else _product_map(node, name, between, constants)
            if found is not None and (found.dtype is None or jnp.issubdtype(found.dtype, jnp.floating)):
                yield found


def _stored_weight(
    name: str, producers: Mapping[str, Node], constants: Mapping[str, np.ndarray]
) -> tuple[str, list[Node]]:
    """The name of the stored array from which a weight is computed, and the nodes between, last first."""
    between: list[Node] = []
    while name in producers:
        node = producers[name]
        if node.op_type in BY_HAND:  # follow the stored integer matrix, not the scale or zero point
            found = [(*_stored_weight(v, producers, constants), v) for v in node.inputs[: 1 + (node.op_type == "Mul")]]
            matrices = [f for f in found if f[0] in constants and _is_integers(constants[f[0]])]
            if len(matrices) != 1:
                break
            return matrices[0][0], [*between, node, *matrices[0][1]]
        if node.op_type not in BETWEEN:
            break
        between.append(node)
        name = node.inputs[0]
    return name, between


def _is_integers(stored: np.ndarray) -> bool:
    return stored.ndim == 2 and not jnp.issubdtype(stored.dtype, jnp.floating)


def _packed_map(node: Node, name: str, constants: Mapping[str, np.ndarray]) -> LinearMap | None:
    scales, weight = constants.get(node.inputs[2]), constants[name]
    if (each := CODES.get((node.domain, node.op_type))) is not None:
        return LinearMap(node, name, (), (weight.shape[1] * each, weight.shape[0]), True, None)
    shape = node.attributes["K"], node.attributes["N"]
    return (
        None
        if scales is None or not node.attributes.get("transB", 1)
        else LinearMap(node, name, (), shape, True, scales.dtype)
    )


def _product_map(node: Node, name: str, between: list[Node], constants: Mapping[str, np.ndarray]) -> LinearMap | None:
    weight, transposed, given = constants[name], False, node.attributes
    dtype: np.dtype | None = weight.dtype
    for step in reversed(between):
        if step.op_type == "Transpose":
            transposed ^= tuple(step.attributes.get("perm", (1, 0))) == (1, 0)
        elif step.op_type == "CastLike":
            dtype = None
        elif step.op_type == "Cast":
            dtype = to_dtype(step.attributes["to"])
        elif step.op_type == "DequantizeLinear":
            scale, code = constants.get(step.inputs[1]), step.attributes.get("output_dtype", 0)
            if scale is None and not code:
                return None
            dtype = to_dtype(code) if scale is None or code else scale.dtype
    factor = given.get("alpha", 1.0)
    moved = any(given.get(k, 0) for k in ("transA", "transBatchA", "transBatchB"))
    if weight.ndim != 2 or moved or not factor:
        return None
    transposed ^= bool(given.get("transB", 0))
    rows, columns = weight.shape
    return LinearMap(
        node, name, tuple(between), (columns, rows) if transposed else (rows, columns), transposed, dtype, factor
    )


def _unsuitable(graph: Graph, maps: list[LinearMap]) -> dict[LinearMap, str]:
    """The linear maps that do not support an adapter, and why."""
    readers = Counter(v for n in graph.nodes for v in n.reads) + Counter(v.name for v in graph.outputs)
    unsuitable = {}
    for linear in maps:
        stored = [linear.name, *(v for n in linear.between for v in n.outputs)]
        others = [n for n in graph.nodes if n not in (linear.node, *linear.between) and set(n.reads) & set(stored)]
        if any(readers[v] > 1 for v in stored):
            unsuitable[linear] = (
                f"is read by {', '.join(map(str, others[:3])) or 'others'} too, which would change as well"
            )
        elif f"{linear.name}.lora_A" in graph.initializers:
            unsuitable[linear] = "already has an adapter in the file; to train that one: trainable='*.lora_[AB]'"
        elif linear.name.endswith((".lora_A", ".lora_B")):
            unsuitable[linear] = "is itself an adapter; to train it: trainable='*.lora_[AB]'"
    return unsuitable


def _matching(
    graph: Graph, maps: list[LinearMap], unsuitable: Mapping[LinearMap, str], pattern: str
) -> list[LinearMap]:
    """The linear maps whose weight or node name matches a pattern."""
    found = [m for m in maps if m.matches(pattern)]
    suitable = [m for m in found if m not in unsuitable]
    if suitable:
        return suitable
    if found:
        raise TrainingFormError(f"lora has {pattern!r}, but {found[0]} {unsuitable[found[0]]}")
    if not maps and pattern == "*":
        raise InputTypeError(
            "lora= finds no linear map with a stored matrix (MatMul, Gemm, MatMulNBits, ...); train parameters by "
            "name: trainable=[...]"
        )
    nodes = {n.name: f"{n} in {g.name!r}" for g in graph.walk() for n in g.nodes}
    weights = {g.key(n): f"{n!r} {v.dtype}{list(v.shape)}" for g in graph.walk() for n, v in g.initializers.items()}
    others = [text for name, text in (nodes | weights).items() if name == pattern or fnmatchcase(name, pattern)]
    available = "; ".join(map(str, maps[:3])) or "none"
    if others:
        raise InputTypeError(
            f"lora has {pattern!r}, which is not a linear map of the main graph: {', '.join(others[:3])}. Adapters "
            f"need a MatMul, Gemm or MatMulNBits with a stored matrix, such as {available}"
        )
    near = nearest(pattern, [n for m in maps for n in (m.name, m.node.name)]) or "none"
    raise InputNameError(f"lora has {pattern!r}, which matches no weight or node; similar names: {near}")


def with_adapters(graph: Graph, found: tuple[Adapter, ...], model: Model) -> Graph:
    """The graph with the adapters' nodes; the graph itself if there are none."""
    return detoured(graph, [a.detour() for a in found], opset_of(model)) if found else graph


def merge_adapters(
    model: Model, found: tuple[Adapter, ...], params: Mapping[str, Any], weights: Mapping[str, Any]
) -> tuple[Model, dict[str, Any]]:
    """(model, parameters) with adapters merged into floating-point weights, or as nodes for packed ones."""
    params = dict(params)
    detours = [a.detour() for a in found if a.map.is_packed]
    for adapter in found:
        if not adapter.map.is_packed:
            a, b, name = params.pop(adapter.a), params.pop(adapter.b), adapter.map.name
            params[name] = adapter.merged(params.get(name, weights[name]), a, b)
    return with_detours(model, detours) if detours else model, params


def scales(found: tuple[Adapter, ...]) -> dict[str, float]:
    """The scale of each adapter by weight name, which an adapter file stores as metadata."""
    return {a.map.name: a.scale for a in found}


def check_scales(path: str | os.PathLike[str], position: Any, found: tuple[Adapter, ...]) -> None:
    """Checks the scales in an adapter file.

    Raises:
        CheckpointError: they differ from those of the adapters.
    """
    saved = position.get("lora") if isinstance(position, Mapping) else None
    if saved != scales(found):
        raise CheckpointError(
            f"{os.fspath(path)!r} has the scales {saved} by weight, but lora_alpha gives {scales(found)}"
        )


def load_adapter(model: Model, path: str | os.PathLike[str]) -> Model:
    """The model with an adapter that ``FineTuning.save_adapter`` wrote, equal to the result of ``to_model``.

    Args:
        model: the model that was fine-tuned.
        path: the adapter's file.

    Raises:
        CheckpointError: the file is not an adapter, or one for another model.
        ImportError: safetensors is not installed.
        FileNotFoundError: no such file.

    >>> import numpy as np, onnx2jax, optax, tempfile
    >>> model = onnx2jax.convert(onnx2jax.demo_model())
    >>> tuned = onnx2jax.finetune(model, lambda y, batch: (y**2).mean(), optax.sgd(0.1), lora=2)
    >>> state, _ = tuned.step(tuned.init(), {"image": np.ones((4, 1, 8, 8), np.float32)})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = tuned.save_adapter(f"{folder}/adapter.safetensors", state)
    ...     again = onnx2jax.training.load_adapter(model, path)
    >>> all((again.params[name] == w).all() for name, w in tuned.to_model(state).params.items())
    True
    """
    if isinstance(model, str | os.PathLike):
        raise InputTypeError(f"the arguments are swapped: load_adapter(model, {os.fspath(model)!r})")
    with opened(path, "save_adapter") as (file, metadata):
        position = metadata.get("position")
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if not isinstance(position, Mapping) or "lora" not in position:
        raise CheckpointError(f"{os.fspath(path)!r} was not written by save_adapter")
    maps = {m.name: m for m in linear_maps(model.graph)}
    found = []
    for name, scale in position["lora"].items():
        a, b = (arrays.get(f"{name}.lora_{which}") for which in "AB")
        linear = maps.get(name)
        if linear is None or a is None or b is None or (a.shape[0], b.shape[1]) != linear.shape:
            raise CheckpointError(f"{os.fspath(path)!r} has an adapter of {name!r}, {_misfit(linear, a, b)}")
        found.append(Adapter(linear, a.shape[1], scale))
    new, params = merge_adapters(model, tuple(found), arrays, model.params)
    return new.with_params(params)


def _misfit(linear: LinearMap | None, a: Any, b: Any) -> str:
    if linear is None:
        return "which is not a linear map of the model"
    return f"A {np.shape(a)} and B {np.shape(b)}, which do not match {linear}"
