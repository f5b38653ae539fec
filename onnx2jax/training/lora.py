"""Low-rank adapters (LoRA): train a product of two thin matrices in parallel to a frozen weight.

    y = x W + (x A) scale B        A [in, rank] is initialised at random, B [rank, out] with zeros

The added path consists of standard ONNX nodes, so it is trained, run and saved like all others.
"""

from __future__ import annotations

import math
import os
import warnings
import zlib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import (
    AdapterWarning,
    CheckpointError,
    InputNameError,
    InputShapeError,
    InputTypeError,
    TrainingFormError,
    nearest,
)
from ..eval.values import to_host
from ..ir.casts import NARROWER
from ..ir.graph import Graph, Node
from ..model.changes.detours import Detour, detoured, opset_of, with_detours
from ..model.changes.rewritten import new_node
from ..model.model import Model
from ..proto.mapped import load
from ..proto.types import to_code
from .checkpoint import opened
from .linear_maps import LinearMap, linear_maps, stored_weight

LAYERS: Final = {"W", "R", "weights"}
"""Operands that are weights of layers which are no linear map: convolutions, recurrences, fused attention."""
LEFT_OUT: Final = 0.1
"""The share of the numbers in layers without an adapter above which a rank for all linear maps warns."""
LISTED: Final = 8
"""The most weights that the fix of a rank lists."""


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

    def detour(self, opset: int) -> Detour:
        """The added nodes, with zeros for A and B."""
        node, scale = self.map.node, f"{self.map.name}.lora_scale"
        (extent, out), prefix, value, x = self.map.shape, f"{node.name}/lora", node.outputs[0], node.inputs[0]
        base, down, scaled, up = (f"{prefix}/{step}" for step in ("base", "down", "scaled", "up"))
        widened, narrowed, delta = list[Node](), list[Node](), up
        if self.dtype != self.map.dtype:
            widened = [new_node(f"{prefix}/x", "Cast", opset, x, to=to_code(self.dtype))]
            x, delta = f"{prefix}/x", f"{prefix}/delta"
            narrowed = [new_node(delta, "CastLike", opset, up, base)]
            if self.map.dtype is not None:
                narrowed = [new_node(delta, "Cast", opset, up, to=to_code(self.map.dtype))]
        steps = (
            *widened,
            new_node(down, "MatMul", opset, x, self.a),
            new_node(scaled, "Mul", opset, down, scale),
            new_node(up, "MatMul", opset, scaled, self.b),
            *narrowed,
            new_node(f"{prefix}/add", "Add", opset, base, delta, outputs=(value,)),
        )
        constants = {
            self.a: np.zeros((extent, self.rank), self.dtype),
            self.b: np.zeros((self.rank, out), self.dtype),
            scale: np.array(self.scale, self.dtype),
        }
        return Detour(value, base, steps, constants)

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


def select_adapters(
    graph: Graph, full: Graph, lora: int | Mapping[str, int] | None, alpha: float | None, dtype: np.dtype | None
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
    maps, rank_of = list(linear_maps(graph)), dict[LinearMap, int]()
    if dtype in NARROWER:
        maps = [replace(m, dtype=dtype) if m.dtype is None or m.dtype in NARROWER[dtype] else m for m in maps]
    unsuitable = _unsuitable(full, maps)
    for pattern, rank in ranks.items():
        for linear in _matching(full, maps, unsuitable, pattern):
            rank_of.setdefault(linear, int(rank))
    if large := [m for m, rank in rank_of.items() if rank > min(m.shape)]:
        more = f", and {len(large) - 1} more," if len(large) > 1 else ""
        smaller = {m.name: min(m.shape) for m in large}
        fix = {**smaller, **{pattern: int(r) for pattern, r in ranks.items() if pattern not in smaller}}
        if len(large) > LISTED:
            fix = {pattern: min(int(r), *smaller.values()) for pattern, r in ranks.items()}
        raise InputShapeError(
            f"lora has rank {rank_of[large[0]]} for {large[0]}{more} above the extents; set smaller ones, of which the "
            f"first match counts: lora={fix}"
        )
    if "*" in ranks:
        _warn_of_layers(graph, rank_of, ranks["*"])
    return tuple(Adapter(m, r, 1.0 if alpha is None else alpha / r) for m in maps if (r := rank_of.get(m)))


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


def _warn_of_layers(graph: Graph, maps: Collection[LinearMap], rank: int) -> None:
    """Warns of a rank for all linear maps in a network that has many weights in other layers."""
    layers = {m.name: m.node for m in maps}
    for node in graph.nodes:
        for name in (n for i, n in enumerate(node.inputs) if n and node.operator.parameter(i) in LAYERS):
            if (stored := stored_weight(name, graph)[0]) in graph.initializers:
                layers[stored] = node
    sizes = {n: graph.initializers[n].size for n in layers}
    left = [n for n in layers if n not in {m.name for m in maps}]
    share = sum(sizes[n] for n in left) / max(1, sum(sizes.values()))
    if share <= LEFT_OUT:
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(layers[n].op_type for n in left).most_common())
    floating = {n: v for n in left if jnp.issubdtype((v := graph.initializers[n]).dtype, jnp.floating)}
    is_deep = floating and all(v.ndim > 2 for v in floating.values())
    fix = "lambda name, weight: weight.ndim > 2" if is_deep else [*floating][:4]
    advice = f"; to train them as well: finetune(..., trainable={fix})" if floating else ""
    warnings.warn(
        f"lora={rank} has adapters beside {len(maps)} of {len(layers)} weights of layers. The others, of {kinds}, "
        f"stay frozen, {share:.0%} of the numbers{advice}",
        AdapterWarning,
        stacklevel=5,
    )


def _matching(
    graph: Graph, maps: list[LinearMap], unsuitable: Mapping[LinearMap, str], pattern: str
) -> list[LinearMap]:
    """The linear maps whose weight or node name matches a pattern."""
    matches = [m for m in maps if m.matches(pattern)]
    suitable = [m for m in matches if m not in unsuitable]
    if suitable:
        return suitable
    if matches:
        raise TrainingFormError(f"lora has {pattern!r}, but {matches[0]} {unsuitable[matches[0]]}")
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


def with_adapters(graph: Graph, adapters: tuple[Adapter, ...], model: Model) -> Graph:
    """The graph with the adapters' nodes; the graph itself if there are none."""
    return detoured(graph, [a.detour(opset_of(model)) for a in adapters]) if adapters else graph


def merge_adapters(
    model: Model, adapters: tuple[Adapter, ...], params: Mapping[str, Any], weights: Mapping[str, Any]
) -> tuple[Model, dict[str, Any]]:
    """(model, parameters) with adapters merged into floating-point weights, or as nodes for packed ones."""
    params = dict(params)
    detours = [a.detour(opset_of(model)) for a in adapters if a.map.is_packed]
    for adapter in adapters:
        if not adapter.map.is_packed:
            a, b, name = params.pop(adapter.a), params.pop(adapter.b), adapter.map.name
            params[name] = adapter.merged(params.get(name, weights[name]), a, b)
    return with_detours(model, detours) if detours else model, params


def scales(adapters: tuple[Adapter, ...]) -> dict[str, float]:
    """The scale of each adapter by weight name, which an adapter file stores as metadata."""
    return {a.map.name: a.scale for a in adapters}


def check_scales(path: str | os.PathLike[str], position: Any, adapters: tuple[Adapter, ...]) -> None:
    """Checks the scales in an adapter file.

    Raises:
        CheckpointError: they differ from those of the adapters.
    """
    saved = position.get("lora") if isinstance(position, Mapping) else None
    if saved != scales(adapters):
        raise CheckpointError(
            f"{os.fspath(path)!r} has the scales {saved} by weight, but lora_alpha gives {scales(adapters)}"
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
    >>> tuned = onnx2jax.finetune(model, lambda y, batch: (y**2).mean(), optax.sgd(0.1), lora={"fc*": 2})
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
    adapters = []
    for name, scale in position["lora"].items():
        linear = maps.get(name)
        a, b = (np.shape(arrays.get(f"{name}.lora_{which}", 0)) for which in "AB")
        if linear is None or (*a[:1], *b[1:]) != linear.shape:
            shapes = f"A {a} and B {b}, which do not match {linear}"
            misfit = shapes if linear else "which is not a linear map of the model"
            raise CheckpointError(f"{os.fspath(path)!r} has an adapter of {name!r}, {misfit}")
        adapters.append(Adapter(linear, a[1], scale))
    new, params = merge_adapters(model, tuple(adapters), arrays, model.params)
    return new.with_params(params)
