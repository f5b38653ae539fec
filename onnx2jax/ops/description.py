"""What the signature of an operator's function declares, and a table of the operators that only move elements.

Other traits are declared where an operator is registered: ``op("Norm", domain="com.example", wide=True)``.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from inspect import Parameter, signature
from types import CodeType
from typing import Any, Final, Literal

FIXTURES: Final = frozenset(
    {"rng", "n_outputs", "opset", "max_trips", "loop_cond", "derivatives", "compiled", "forward_only", "warn", "once"}
    | {"shards", "extents", "wide", "double", "dropped"}
)
"""Keyword-only parameters whose arguments the interpreter supplies, to operators that declare them."""

POSITIVE: Final = frozenset(
    {"blocksize", "chunk_size", "clip", "dilation", "dilations", "group", "hidden_size", "kernel_shape", "num_groups"}
    | {"max_output_entries", "ngram_size", "output_height", "output_width", "p", "pooled_shape", "size", "step"}
    | {"strides"}
)
"""Attributes of ONNX's and onnxruntime's operators whose numbers are positive."""
POSITIVE_IF_REQUIRED: Final = frozenset({"block_size", "kv_num_heads", "num_heads", "q_num_heads"})
"""Attributes of which 0 stands for none where an operator does not require them."""


@functools.cache
def _compiled(annotation: str) -> CodeType:
    return compile(annotation, "<annotation>", "eval")


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function, evaluated. ``typing.get_type_hints`` took a fifth of this package's import."""
    scope = getattr(inspect.unwrap(function), "__globals__", {})
    hints = getattr(function, "__annotations__", {})
    return {k: eval(_compiled(hint), scope) if isinstance(hint, str) else hint for k, hint in hints.items()}


def described(domain: str, function: Callable[..., Any]) -> dict[str, Any]:
    """The fields of an Operator that the signature of its function declares."""
    hints = _hints(function)
    names: dict[Any, list[str]] = {}
    positive = set()
    for p in signature(function).parameters.values():
        names.setdefault(p.kind, []).append(p.name)
        if p.name in POSITIVE or (p.name in POSITIVE_IF_REQUIRED and p.default is p.empty):
            positive.add(p.name)

    marked = {
        mark.replace(" ", "_"): frozenset(k for k, hint in hints.items() if mark in getattr(hint, "__metadata__", ()))
        for mark in ("static", "may be traced", "relative", "shaped", "may be empty")
    }
    keywords = frozenset(names.get(Parameter.KEYWORD_ONLY, ()))
    return {
        "inputs": (*names.get(Parameter.POSITIONAL_ONLY, ()), *names.get(Parameter.POSITIONAL_OR_KEYWORD, ())),
        "variadic": names.get(Parameter.VAR_POSITIONAL, [None])[0],
        "attributes": keywords - FIXTURES,
        **marked,
        "fixtures": keywords & FIXTURES,
        "choices": {k: typing.get_args(hint) for k, hint in hints.items() if typing.get_origin(hint) is Literal},
        "positive": frozenset(positive) & keywords if domain in ("", "com.microsoft") else frozenset(),
        "for_siblings": getattr(function, "for_siblings", None),
    }


MOVES: Final = {
    "": "Concat Expand Flatten Gather Identity Reshape Slice Split Squeeze Tile Transpose Unsqueeze",
    "ai.onnx.ml": "ArrayFeatureExtractor",
}
"""Operators by domain that move elements, strings too, and compute nothing."""

TRAITS: Final = {(domain, name): {"moves": True} for domain, names in MOVES.items() for name in names.split()}
"""(domain, operator) -> traits beside those that the operator's registration sets."""
