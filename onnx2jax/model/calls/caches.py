"""What a decoder's inputs and outputs are for: tokens, masks, positions, and the caches that a step hands to the next.

Files say it by names alone, which differ between exporters, and by the graph: a cache is an input from which an output
of the same kind is made, by appending to it or by writing into it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, cast

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import OnnxError, UnsupportedError
from ...ir import analysis
from ...ir.graph import Graph, Node
from ...proto.types import TensorType, ValueInfo

if TYPE_CHECKING:
    from ..model import Model

Dims = tuple[int | str | None, ...]

ROLES: Final = {
    "tokens": r"(decoder_)?(input_ids|input_tokens|tokens)",
    "embeddings": r"(decoder_)?inputs?_embeds?",
    "mask": r"(decoder_)?(attention_mask|attn_mask)",
    "positions": r"(decoder_)?position_ids",
    "places": r"cache_position",
    "lengths": r"seqlens_k",
    "total": r"total_seq(uence)?_len(gth)?",
    "past": r"past_seq(uence)?_len(gth)?",
    "has_past": r"use_cache_branch",
}
"""What an input is for -> its names, as a regular expression."""

BY_OPERATOR: Final = {
    ("com.microsoft", "GroupQueryAttention"): {1: 3, 2: 4},
    ("com.microsoft", "MultiHeadAttention"): {1: 6, 2: 7},
    ("com.microsoft", "Attention"): {1: 4},
    ("com.microsoft", "CausalConvWithState"): {1: 3},
    ("com.microsoft", "LinearAttention"): {1: 3},
    ("com.microsoft", "GatedDeltaNet"): {1: 6},
    ("", "Attention"): {1: 4, 2: 5},
}
"""The operators that keep a cache of their own: which output is which input, later."""

FOLLOWED: Final = frozenset(
    [
        "Cast",
        "Concat",
        "Identity",
        "Reshape",
        "ScatterElements",
        "ScatterND",
        "Slice",
        "Squeeze",
        "TensorScatter",
        "Transpose",
        "Unsqueeze",
    ]
)
"""The operators of ai.onnx whose result is their first input, changed in part or laid out anew."""


@dataclass(frozen=True)
class Pair:
    """A cache: what a step is given, and what it gives to the next.

    Attributes:
        past: the input.
        present: the name of the output.
        axis: the axis along which tokens lie; None where the extents stay as they are, as in a convolution's state.
        maker: the node that makes the output of the input; None where that is not one node.
    """

    past: ValueInfo
    present: str
    axis: int | None
    maker: Node | None = field(default=None, compare=False)

    @property
    def batch(self) -> int | None:
        """The axis of the sequences: the first that is free and not the tokens'."""
        free = (i for i, d in enumerate(self.dims) if not isinstance(d, int) and i != self.axis)
        return next(free, None)

    @property
    def window(self) -> int:
        """How many tokens a cache that slides has room for from the first on; 0 for one that grows."""
        said = self.maker.attributes if self.maker is not None else {}
        return int(said.get("local_window_size", 0)) if said.get("sliding_window_cache") else 0

    @property
    def dims(self) -> Dims:
        """The declared shape."""
        return self.past.shape or ()

    @property
    def dtype(self) -> np.dtype:
        """The element type."""
        assert isinstance(self.past.type, TensorType)
        return self.past.type.dtype


@dataclass(frozen=True)
class Caches:
    """The inputs and outputs of a decoder by what they are for.

    Attributes:
        roles: the inputs that have one of ROLES, by that.
        pairs: the caches.
        others: the other inputs, such as what an encoder gives.
        logits: the output with a number for each token of the vocabulary; None where there is none of rank 3.
    """

    roles: Mapping[str, ValueInfo]
    pairs: Sequence[Pair]
    others: Sequence[ValueInfo]
    logits: str | None

    def empty(self, batch: int) -> dict[str, np.ndarray]:
        """Every cache before the first token: tokens 0, states and what slides as zeros; by input name."""
        return {p.past.name: np.zeros(extents(p, batch, p.window), p.dtype) for p in self.pairs}


def caches(model: Model) -> Caches:
    """What a decoder's inputs and outputs are for.

    >>> import onnx2jax
    >>> found = caches(onnx2jax.convert(onnx2jax.demo_decoder()))
    >>> sorted(found.roles), [p.past.name for p in found.pairs][:2], found.pairs[0].axis, found.logits
    (['mask', 'tokens'], ['past_key_values.0.key', 'past_key_values.0.value'], 2, 'logits')
    """
    roles: dict[str, ValueInfo] = {}
    for role, pattern in ROLES.items():
        found = [v for v in model.inputs if re.fullmatch(pattern, v.name)]
        if found:
            roles[role] = found[0]
    taken = {v.name for v in roles.values()}
    pairs = tuple(_pairs(model.graph, [v for v in model.inputs if v.name not in taken]))
    sizes: dict[str, int] = {}
    pairs = tuple(_with_sizes(model, pair, sizes) for pair in pairs)
    taken |= {p.past.name for p in pairs}
    others = tuple(v for v in model.inputs if v.name not in taken)
    return Caches(roles, pairs, others, _logits(model.graph, pairs))


def extents(pair: Pair, batch: int, length: int) -> tuple[int, ...]:
    """The shape of a cache for so many sequences, with room for so many tokens where the file leaves that free."""
    given = {pair.axis: length, pair.batch: batch}
    shape = [d if isinstance(d, int) else given.get(i, d) for i, d in enumerate(pair.dims)]
    if unknown := [d for d in shape if not isinstance(d, int)]:
        raise UnsupportedError(
            f"the extents {unknown} of the cache {pair.past} do not follow from the model: "
            "convert(..., dim_overrides={name: extent}) says them"
        )
    return cast(tuple[int, ...], tuple(shape))


def _with_sizes(model: Model, pair: Pair, sizes: dict[str, int]) -> Pair:
    """The pair with extents for what is neither batch nor tokens: by ``sizes``, which grows, or measured."""
    free = {i: d for i, d in enumerate(pair.dims) if i not in (pair.axis, pair.batch) and not isinstance(d, int)}
    known = {i: sizes[d] for i, d in free.items() if d in sizes}
    if known.keys() != free.keys():
        shape = _written(model, pair)
        known |= {i: shape[i] for i in free if i < len(shape)}
        sizes |= {d: known[i] for i, d in free.items() if d is not None and i in known}
    return replace(pair, past=pair.past.reshaped([known.get(i, d) for i, d in enumerate(pair.dims)]))


def _written(model: Model, pair: Pair) -> Sequence[int]:
    """The shape of what is written into a cache for one token; () where that does not show."""
    node = pair.maker
    if node is None:
        return ()
    place = 1 if len(node.inputs) > 1 and node.inputs[1] else 0  # a packed query holds keys and values too
    before = model.cut(outputs=[node.inputs[place]])
    feeds = {
        v.name: jax.ShapeDtypeStruct([d if isinstance(d, int) else 1 for d in v.shape or ()], v.type.dtype)
        for v in before.inputs
        if isinstance(v.type, TensorType)
    }
    stored = analysis.parameters(before.graph)  # without reading what lies in files
    params = {n: jax.ShapeDtypeStruct(v.shape, v.dtype) for n, v in stored.items()}
    try:
        shape: Sequence[int] = jax.eval_shape(lambda p, f: before.apply(p, **f), params, feeds).shape
    except (OnnxError, TypeError):
        return ()
    if len(shape) == 3 and (heads := node.attributes.get("num_heads")):
        keys = node.attributes.get("kv_num_heads", heads)
        return (shape[0], keys, shape[1], shape[2] // (keys if place else heads + 2 * keys))
    return shape


def _pairs(graph: Graph, inputs: Sequence[ValueInfo]) -> Iterator[Pair]:
    outputs = {v.name: v for v in graph.outputs}
    makers = {name: node for node in graph.nodes for name in node.outputs if name}
    names = {v.name for v in inputs}
    by_graph: dict[str, tuple[str, Node | None]] = {}
    for output in graph.outputs:
        found, maker = _origin(output.name, makers, names)
        if found is not None:
            by_graph.setdefault(found, (output.name, maker))
    for past in inputs:
        if not isinstance(past.type, TensorType) or past.shape is None or len(past.shape) < 2:
            continue
        present, maker = by_graph.get(past.name, (namesake(past.name, outputs), None))
        if present is None:
            continue
        kind = outputs[present].type
        if (
            isinstance(kind, TensorType)
            and kind.dtype == past.type.dtype
            and len(kind.shape or past.shape) == len(past.shape)
        ):
            yield Pair(past, present, _axis(past, outputs[present], maker), maker)


def _origin(name: str, makers: Mapping[str, Node], inputs: set[str]) -> tuple[str | None, Node | None]:
    """The input of which a value is a later state, and the node that changes it, where that is one."""
    changes: list[Node] = []
    while name in makers:
        node = makers[name]
        place = BY_OPERATOR.get((node.domain, node.op_type), {}).get(node.outputs.index(name))
        if place is None:
            if node.domain or node.op_type not in FOLLOWED:
                return None, None
            place = 0
        if node.op_type not in ("Identity", "Cast"):
            changes.append(node)
        if place >= len(node.inputs):
            return None, None
        name = node.inputs[place]
    return (name if name in inputs and changes else None), (changes[0] if len(changes) == 1 else None)


def namesake(name: str, outputs: Mapping[str, ValueInfo]) -> str | None:
    """The output that the exporters' names say is this cache, later."""
    candidates = (
        name.replace("past_key_values", "present"),
        name.replace("past_key_values", "present_key_values"),
        name.replace("past_", "present_"),
        name.replace("past", "present"),
        f"{name}_out",
        f"new_{name}",
        f"present_{name}",
        f"updated_{name}",
    )
    return next((c for c in candidates if c != name and c in outputs), None)


def _axis(past: ValueInfo, present: ValueInfo, maker: Node | None) -> int | None:
    """The axis along which tokens lie."""
    before, after = past.shape or (), present.shape or ()
    if maker is not None and maker.op_type == "Concat" and not maker.domain:
        return int(maker.attributes["axis"]) % len(before)
    said = [i for i, d in enumerate(before) if isinstance(d, str) and re.search("past|seq|len|cache_", d) and i]
    moved = [i for i, (a, b) in enumerate(zip(before, after, strict=False)) if i and a != b and not isinstance(a, int)]
    if found := said or moved:
        return found[0]
    in_operator = maker is not None and maker.op_type.endswith("Attention") and not maker.op_type.startswith("Linear")
    if len(before) == 4 and (in_operator or re.search("key|value", past.name)) and not re.search("state", past.name):
        return 2  # [batch, heads, tokens, size]
    return None


def _logits(graph: Graph, pairs: Sequence[Pair]) -> str | None:
    caches = {p.present for p in pairs}
    found = [
        v
        for v in graph.outputs
        if v.name not in caches
        and isinstance(v.type, TensorType)
        and jnp.issubdtype(v.type.dtype, np.floating)
        and len(v.shape or (0, 0, 0)) == 3
    ]
    named = [v for v in found if "logits" in v.name]
    return next((v.name for v in (*named, *found)), None)
