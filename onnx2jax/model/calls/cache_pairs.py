"""Finds a decoder's KV caches in its graph: pairs of an input and the output that is its next state."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np

from ...errors import RecompilationWarning
from ...ir.graph import Graph, Node
from ...proto.types import TensorType, ValueInfo

Dims = tuple[int | str | None, ...]

BY_OPERATOR: Final = {
    ("com.microsoft", "GroupQueryAttention"): {1: 3, 2: 4},
    ("com.microsoft", "MultiHeadAttention"): {1: 6, 2: 7},
    ("com.microsoft", "Attention"): {1: 4},
    ("com.microsoft", "CausalConvWithState"): {1: 3},
    ("com.microsoft", "LinearAttention"): {1: 3},
    ("com.microsoft", "GatedDeltaNet"): {1: 6},
    ("", "Attention"): {1: 4, 2: 5},
}
"""Operators with a cache: output index -> index of the input whose next state it is."""

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
"""Operators of ai.onnx whose result is their first input, updated or rearranged."""


@dataclass(frozen=True)
class Pair:
    """A cache: an input, and the output that is its next state.

    Attributes:
        past: the input.
        present: the name of the output.
        axis: the token axis; None for a state of constant shape, such as a convolution's.
        producer: the node that computes the output from the input; None if several nodes do.
    """

    past: ValueInfo
    present: str
    axis: int | None
    producer: Node | None = field(default=None, compare=False)

    @property
    def batch(self) -> int | None:
        """The batch axis: the first free axis other than the token axis."""
        free = (i for i, d in enumerate(self.dims) if not isinstance(d, int) and i != self.axis)
        return next(free, None)

    @property
    def window(self) -> int:
        """The length in tokens of a sliding-window cache; 0 for one that grows."""
        attributes = self.producer.attributes if self.producer is not None else {}
        return int(attributes.get("local_window_size", 0)) if attributes.get("sliding_window_cache") else 0

    @property
    def dims(self) -> Dims:
        """The declared shape."""
        return self.past.shape or ()

    @property
    def dtype(self) -> np.dtype:
        """The element type."""
        assert isinstance(self.past.type, TensorType)
        return self.past.type.dtype


def pairs_of(graph: Graph, inputs: Sequence[ValueInfo]) -> Iterator[Pair]:
    """The caches among the inputs, each with the output that is its next state."""
    outputs = {v.name: v for v in graph.outputs}
    producers = {name: node for node in graph.nodes for name in node.outputs if name}
    names = {v.name for v in inputs}
    by_graph: dict[str, tuple[str, Node | None]] = {}
    for output in graph.outputs:
        source, producer = _origin(output.name, producers, names)
        if source is not None:
            by_graph.setdefault(source, (output.name, producer))
    for past in inputs:
        if not isinstance(past.type, TensorType) or past.shape is None or len(past.shape) < 2:
            continue
        present, producer = by_graph.get(past.name, (namesake(past.name, outputs), None))
        if present is None:
            continue
        kind = outputs[present].type
        if (
            isinstance(kind, TensorType)
            and kind.dtype == past.type.dtype
            and len(kind.shape or past.shape) == len(past.shape)
        ):
            yield Pair(past, present, _axis(past, outputs[present], producer), producer)


def _origin(name: str, producers: Mapping[str, Node], inputs: set[str]) -> tuple[str | None, Node | None]:
    """The input whose next state a value is, and the node that updates it, if a single node does."""
    changes: list[Node] = []
    while name in producers:
        node = producers[name]
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
    """The output that is a cache's next state by the naming conventions of exporters."""
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


def _axis(past: ValueInfo, present: ValueInfo, producer: Node | None) -> int | None:
    """The token axis."""
    before, after = past.shape or (), present.shape or ()
    if producer is not None and producer.op_type == "Concat" and not producer.domain:
        return int(producer.attributes["axis"]) % len(before)
    named = [i for i, d in enumerate(before) if isinstance(d, str) and re.search("past|seq|len|cache_", d) and i]
    grown = [i for i, (a, b) in enumerate(zip(before, after, strict=False)) if i and a != b and not isinstance(a, int)]
    if pairs := named or grown:
        return pairs[0]
    operator = "" if producer is None else producer.op_type
    in_operator = operator.endswith("Attention") and not operator.startswith("Linear")
    if len(before) == 4 and (in_operator or re.search("key|value", past.name)) and not re.search("state", past.name):
        return 2  # [batch, heads, tokens, size]
    return None


MOST: Final = 3
"""Compilations for a growing cache before the warning."""


@dataclass(eq=False)
class CacheGrowth:
    """Detects growing KV caches from the last shapes of a model's inputs."""

    _last: dict[str, list[tuple[int, ...]]] = field(default_factory=dict, init=False)
    _names: set[str] | None = field(default=None, init=False)
    """Inputs that are KV caches, computed when an input first grows; empty after the warning."""

    def note(self, graph: Graph, inputs: Sequence[ValueInfo], values: Mapping[str, Any]) -> None:
        """Record the shapes of a call that compiled; warn once, when a KV cache has grown MOST - 1 times.

        The KV caches are identified only then, which keeps the first call short.
        """
        grown = []
        for name, value in values.items():
            last = self._last[name] = [*self._last.get(name, ()), tuple(getattr(value, "shape", ()))][-MOST:]
            if len(last) == MOST and all(a < b for a, b in pairwise(last)):
                grown.append(name)
        if grown and self._names is None:
            self._names = {p.past.name for p in pairs_of(graph, inputs) if p.axis is not None}
        if name := next((n for n in grown if n in (self._names or ())), ""):
            self._names = set()
            warnings.warn(
                f"{graph.name!r} is recompiled for every token, because its cache {name!r} grows: "
                f"{', '.join(map(str, self._last[name]))}. With a KV cache of fixed length it is compiled twice: "
                "onnx2jax.decoder(model).generate(tokens, max_new_tokens), or its prefill and step",
                RecompilationWarning,
                stacklevel=5,
            )
