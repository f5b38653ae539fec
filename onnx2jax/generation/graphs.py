"""The graphs behind a decoder's calls, and their inputs.

The graph of a prompt's call computes the logits of each prompt's last token alone. What follows the last node that
mixes tokens, the output projection above all, then has one row rather than one for each token: of a 0.5-billion
decoder's FLOPs it is a quarter, and its result for 8 prompts of 512 tokens takes 2 GB. So has the feed-forward network
of the last layer: of two layers, 8 prompts of 512 tokens move 950 MB on a TPU v5e rather than 1118.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import OnnxError
from ..eval.abstract import is_elementwise
from ..ir import layers
from ..ir.analysis import parameters
from ..ir.graph import Graph, Node, descendants, with_graphs
from ..model.caches import Caches, extents
from ..model.changes.dtype import computed_again
from ..model.changes.parts import with_graph
from ..model.model import Model
from ..ops.registry import resolve
from ..proto.types import TensorType, ValueInfo
from ..runtime.params import device_of, is_cpu
from . import in_place
from .cache import Appended, Buffer, Kind
from .in_place import ENCODER_LENGTH, PROBED_LENGTHS, Values, applied, operator, probe, slopes

LEAST_BYTES: Final = 20 << 20
"""Weights of a layer, which then takes 2 ms or more a token, and is called rather than inlined into one program.

A decoder in int4 of 1.1 billion parameters, 22 layers of 25 MB, on 2 cores: seconds until it has generated 16 tokens,
and ms a token later:

                                                  jax 0.10        jax 0.12
    one program, a loop over tokens on the device 22, 48 to 56    25, 76 to 84
    a call for each layer                          7, 50 to 62     7, 49 to 64

Dispatch competes with the computation for the cores: on jax 0.10, 4 to 12 % of a token, 10 to 25 % for layers of 10 MB,
and in float32 nothing. The 15 s of compiling pay for that up to some 3000 tokens. On jax 0.12 kernels inside of a loop
share a thread.

Tried on jax 0.10, times of asynchronous dispatch of each layer: waiting for each layer, or for every fourth: 1.05; two
layers a call: 1.04, eleven: 1.8 (XLA schedules long programs worse); a loop of one trip around each layer: 1.01; loops
over words unrolled: 20; not reading between tokens whether all texts have ended: 1.01; the dispatching thread under
Linux's SCHED_BATCH: 1.02, SCHED_IDLE: 0.98. ``scan_layers=True``, whose loop copies weights: 3.5.
"""


class Graphs:
    """The graphs behind a decoder's calls: the file's own, and rewrites of it for fixed-length caches.

    Attributes: those of ``Steps``, which sets them.
    """

    model: Model
    first: Model
    caches: Caches
    pairs: dict[str, Buffer]
    _logits: ValueInfo

    @property
    def _two_files(self) -> bool:
        return self.first is not self.model

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        """How the model updates each cache."""
        return {n: buffer.kind for n, buffer in self.pairs.items()}

    @cached_property
    def _appended(self) -> dict[str, Appended]:
        return {n: buffer for n, buffer in self.pairs.items() if isinstance(buffer, Appended)}

    @cached_property
    def _in_place_model(self) -> Model | None:
        """The model with its Concat nodes rewritten as in-place writes; None if a cache is appended in another way."""
        graph = in_place.write_to_buffers(self.model.graph, self._appended)
        if graph is None:
            return None
        if self._shifts_positions:
            graph = in_place.shift_positions(graph, slopes(self._probes), self.model.params)
        if self._masks_softmax:
            graph = in_place.mask_softmax(graph, self._probes)
        return with_graph(self.model, computed_again(self.model, graph))

    @cached_property
    def _shifts_positions(self) -> bool:
        """Whether the model derives positions from cache extents, because it has no input for them."""
        return bool(self._appended) and not self._roles_read & {"positions", "places"}

    @cached_property
    def _masks_softmax(self) -> bool:
        """Whether empty slots must be masked at each Softmax, because the model has no mask input."""
        return bool(self._appended) and not self._roles_read & {"mask", "lengths"} and not self._has("state")

    @cached_property
    def _roles_read(self) -> set[str]:
        """The roles of inputs that a node reads; some files declare inputs that none does."""
        read = {n for node in self.model.graph.nodes for n in node.reads}
        return {role for role, v in self.caches.roles.items() if v.name in read}

    def _has(self, kind: Kind) -> bool:
        return kind in self.kinds.values()

    @cached_property
    def _full_cache_model(self) -> Model:
        """The model for calls with the full cache as input, with positions shifted to the tokens present."""
        model, mask = self.model, self.caches.roles.get("mask")
        if self._appended or self._two_files or mask is None or not in_place.reads_extents(model.graph, mask.name):
            return model
        graph = in_place.shift_positions(model.graph, slopes(self._probes), model.params)
        return with_graph(model, computed_again(model, graph))

    @cached_property
    def _prefill_model(self) -> Model:
        """The model for prompts: with an input of each one's last position, where that saves computing other logits."""
        model = self.first if self._two_files else self._full_cache_model
        graph = None if self._last_logits_only else with_last_logits(model.graph, self._logits.name)
        return model if graph is None else with_graph(model, computed_again(model, graph))

    @cached_property
    def _last_logits_only(self) -> bool:
        """Whether the model returns the logits of the last token alone."""
        return bool(self._logits.shape and self._logits.shape[1] == 1)

    @cached_property
    def _probes(self) -> list[Values]:
        """Probes of a step for each of PROBED_LENGTHS; [] if it cannot be traced."""
        try:
            return [probe(self.model, self._cache_types(n), self.caches.others, n, self._feeds) for n in PROBED_LENGTHS]
        except (OnnxError, TypeError, ValueError):  # if it matters, the verification before generating fails
            return []

    def _cache_types(self, length: int) -> dict[str, Any]:
        """Cache shapes and dtypes for one sequence of ``length`` tokens, and a free slot in caches that do not grow."""
        lengths = {"appended": length, "cross": ENCODER_LENGTH}
        shapes = {n: extents(b, 1, max(lengths.get(b.kind, length + 1), b.window)) for n, b in self.pairs.items()}
        return {n: jax.ShapeDtypeStruct(shape, self.pairs[n].dtype) for n, shape in shapes.items()}

    def _feeds(self, model: Model, tokens: Any, positions: Any, mask: Any, slots: Any) -> dict[str, Any]:
        """The model's inputs for tokens [batch, count], their positions and cache slots, and a mask over slots."""
        roles, total, count = self.caches.roles, mask.shape[1], tokens.shape[1]
        at = slots if self._has("fixed") else jnp.arange(total - count, total, dtype=np.int32)
        values: dict[str, Any] = {
            "tokens": tokens,
            "embeddings": tokens,
            "places": slots,
            "lengths": jnp.sum(mask, axis=1, dtype=np.int32) - 1,
            "total": np.asarray(total),
            "past": np.asarray(total - count),
        }
        feeds = {}
        for role, declared in roles.items():
            rank, dtype = len(declared.shape or ()), _dtype(declared)
            if role == "mask":
                value = _masked(mask, at, dtype) if rank == 4 else mask
            elif role == "positions":
                value = jnp.broadcast_to(positions, (3, *positions.shape)) if rank == 3 else positions
            else:
                value = values.get(role)
            if value is not None and any(v.name == declared.name for v in model.inputs):
                if role in ("total", "past", "lengths"):
                    value = value.reshape([-1] * rank)
                feeds[declared.name] = value.astype(dtype)
        return feeds


def compiled_models(graphs: Graphs) -> list[Model]:
    """The models whose graphs and constants determine the compiled programs."""
    changed = graphs._shifts_positions or graphs._masks_softmax
    written = [graphs._in_place_model] if changed and graphs._in_place_model is not None else []
    return [graphs.model, graphs.first, graphs._full_cache_model, *written]


def _masked(mask: Any, at: Any, dtype: np.dtype) -> Any:
    """A causal mask [batch, 1, count, slots] of the tokens in slots ``at``, from a mask over slots."""
    seen = mask[:, None, None] & (jnp.arange(mask.shape[1], dtype=np.int32) <= at[:, None])
    return seen if dtype == bool else jnp.where(seen, 0, jnp.finfo(dtype).min).astype(dtype)


def _dtype(value: ValueInfo) -> np.dtype:
    assert isinstance(value.type, TensorType)
    return value.type.dtype


LAST: Final = "\0last"
"""The input with each prompt's last position, int32[batch]."""

_PRODUCTS: Final = frozenset({"MatMul", "MatMulNBits"})
_NORMS: Final = frozenset(
    {
        *("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"),
        *("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
    }
)


def select_last(x: Any, last: Any) -> Any:
    """The token at position ``last`` [batch] of each sequence in x [batch, tokens, size]: [batch, 1, size].

    What broadcasts to all tokens stays as it is.
    """
    if x.ndim < 2 or x.shape[-2] == 1:
        return x
    return jnp.take_along_axis(jnp.broadcast_to(x, (len(last), *x.shape[-2:])), last[:, None, None], axis=1)


SELECT: Final = operator("SelectLast", select_last, ("x", "last"))


def with_last_logits(graph: Graph, logits: str) -> Graph | None:
    """The graph with an input ``LAST``, and logits [batch, 1, vocabulary]; None if no node treats tokens one by one.

    All nodes between the last one that mixes tokens and the logits get the last tokens alone: with the output
    projection, the feed-forward network of the last layer.
    """
    inputs = {v.name for v in graph.inputs}
    computed = inputs.union(*(node.outputs for node in descendants(graph.nodes, inputs)))
    outside = {v.name for v in graph.outputs} - {logits}
    found, used = set[Node](), {logits}
    for node in reversed(graph.nodes):
        results = {name for name in node.outputs if name}
        if results & used and not results & outside and _is_by_token(node, graph, computed):
            found.add(node)
            used.update(n for n in node.reads if n in computed)
        else:
            outside.update(node.reads)
    if not any(node.op_type in _PRODUCTS for node in found):
        return None
    inner = {name for node in found for name in node.outputs}
    selected, nodes = dict[str, str](), list[Node]()
    for node in graph.nodes:
        if node in found:
            for name in used.intersection(node.inputs) - inner - selected.keys():
                selected[name] = f"\0last {name}"
                nodes.append(applied(SELECT, (name, LAST), selected[name]))
            node = replace(node, inputs=tuple(selected.get(n, n) for n in node.inputs))
        nodes.append(node)
    outputs = tuple(replace(v, type=_any_shape(v.type)) if v.name == logits else v for v in graph.outputs)
    last = ValueInfo(LAST, TensorType(np.dtype(np.int32), None))
    return replace(graph, nodes=tuple(nodes), inputs=(*graph.inputs, last), outputs=outputs)


def _is_by_token(node: Node, graph: Graph, computed: Set[str]) -> bool:
    """Whether a node computes each token of [batch, tokens, size] by itself: elementwise, by a weight, or a norm."""
    others = [n for n in node.reads if n not in computed]
    if node.domain not in ("", "com.microsoft") or node.graphs:
        return False
    if node.op_type in _PRODUCTS:
        return len(others) == len(node.reads) - 1 and node.inputs[0] in computed
    if not is_elementwise(node) and not (node.op_type in _NORMS and node.attributes.get("axis", -1) == -1):
        return False
    shapes = [np.shape(graph.initializers.get(n, np.empty((2, 2)))) for n in others]
    return all(len(shape) < 2 or shape[-2] == 1 for shape in shapes)


def _any_shape(declared: Any) -> Any:
    return TensorType(declared.dtype, None) if isinstance(declared, TensorType) else declared


def inline_branch(graph: Graph, flag: str, value: bool) -> Graph:
    """The graph with each If over the input ``flag`` replaced by the nodes of the branch that ``value`` selects.

    Parameters keep their names in ``Model.params``.
    """
    nodes: list[Node] = []
    initializers = dict(graph.initializers)
    lifted = set(graph.lifted)
    for node in graph.nodes:
        if node.op_type != "If" or node.domain or node.inputs != (flag,):
            nodes.append(node)
            continue
        branch = node.attributes["then_branch" if value else "else_branch"]
        names = {n: branch.key(n) for n in branch.initializers}
        initializers |= {names[n]: v for n, v in branch.initializers.items()}
        lifted |= {names[n] for n in branch.lifted}
        nodes += (_renamed(inner, names) for inner in branch.nodes)
        for output, outer in zip(branch.outputs, node.outputs, strict=True):
            source = names.get(output.name, output.name)
            if outer and source != outer:
                identity = resolve("", "Identity")
                nodes.append(
                    Node(f"{node.name}/{outer}", "Identity", "", node.opset, (source,), (outer,), {}, identity)
                )
    return replace(graph, nodes=tuple(nodes), initializers=initializers, lifted=frozenset(lifted))


def _renamed(node: Node, names: Mapping[str, str]) -> Node:
    """The node with initializers renamed, in its subgraphs too."""

    def inner(graph: Graph) -> Graph:
        nodes = tuple(_renamed(n, names) for n in graph.nodes)
        return replace(
            graph, nodes=nodes, outputs=tuple(replace(v, name=names.get(v.name, v.name)) for v in graph.outputs)
        )

    inputs, implicit = (tuple(names.get(n, n) for n in values) for values in (node.inputs, node.implicit_inputs))
    attributes = with_graphs(node.attributes, inner)
    return replace(node, inputs=inputs, implicit_inputs=implicit, attributes=attributes)


def with_layer_calls(model: Model) -> Model:
    """The model with its repeated layers as calls where that pays, unless ``convert(scan_layers=)`` says how."""
    options = model.options
    if options.scan_layers is not None or options.skipped is None or model.placement is not None:
        return model
    weights = parameters(model.graph)
    if sum(v.nbytes for v in weights.values()) < 2 * LEAST_BYTES or not is_cpu(device_of(())):
        return model
    for run in layers.repeated(model.graph):
        if sum(weights[n].nbytes for n in run.columns if n in weights) >= LEAST_BYTES:
            return model.with_options(scan_layers="calls")
    return model
