"""Which node computes the first NaN or infinity, where ``jax.debug_nans`` or ``jax.debug_infs`` refuses one."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from ... import compat
from ...errors import OnnxError
from ...ir.graph import Node
from ...ops.arrays import is_traced
from .comparison import described, is_inexact


@contextmanager
def naming_their_node(model: Any, values: Mapping[str, Any], rng: Any) -> Iterator[None]:
    """Raises JAX's FloatingPointError again with the node that computes the first such value.

    Args:
        model: the Model that is called.
        values: its inputs by name.
        rng: its random key.
    """
    try:
        yield
    except FloatingPointError as error:
        if is_traced(values, rng) or jax.process_count() > 1:
            raise
        kinds = [k for k in ("nan", "inf") if getattr(jax.config, f"jax_debug_{k}s")]
        if (message := first_special(model, values, rng, kinds)) is None:
            raise
        raise FloatingPointError(message) from error


def first_special(model: Any, values: Mapping[str, Any], rng: Any, kinds: Sequence[str]) -> str | None:
    """A message that names the first node on whose account an output holds NaN or an infinity.

    All values of the main graph are computed, by a program of their own.

    Args:
        model, values, rng: as above.
        kinds: "nan", "inf", or both; the first that an output holds is followed.

    Returns:
        None if no output holds one, as where that program rounds differently.
    """
    with compat.any_values():
        try:
            known = {**model.params, **values, **model.values(rng=rng, **values)}
        except OnnxError:
            return None
        names = [v.name for v in model.outputs]
    return next(filter(None, (_origin(model, known, names, kind) for kind in kinds)), None)


def _origin(model: Any, known: Mapping[str, Any], names: list[str], kind: str) -> str | None:
    """The message for the values ``names``; an infinity among the operands of a node with NaN is followed, too."""

    @functools.cache
    def is_bad(name: str) -> bool:
        return holds(known.get(name), kind)

    bad = {n for n in names if is_bad(n)}
    origin: Node | None = None
    for node in reversed(model.graph.nodes):
        if bad.isdisjoint(node.outputs):
            continue
        if operands := set(filter(is_bad, node.reads)):
            bad |= operands
        else:
            origin = node
    if origin is None:
        sources = sorted(bad & (known.keys() - model.graph.producers.keys()))
        return f"{sources[0]!r}, an input or parameter of {model.graph.name!r}, holds {kind}" if sources else None
    name = next(n for n in origin.outputs if is_bad(n))
    ranges = ", ".join(f"{n}: {_range(known.get(n))}" for n in origin.reads) or "none"
    lines = [f"{origin}: output {name!r} holds {kind}, and no operand does", f"operands: {ranges}"]
    earlier = None if kind == "inf" else _origin(model, known, list(origin.reads), "inf")
    if earlier:
        lines.append(f"before it, {earlier}")
    elif known[name].dtype == np.float16:
        lines.append("float16 ends at 65504; bfloat16 has the range of float32: convert(..., dtype='bfloat16')")
    return "\n".join(lines)


def _range(value: Any) -> str:
    """Element type, shape and range of an operand."""
    if not is_inexact(value) or not value.size or value.dtype.kind == "c":
        return described(value)
    numbers = np.asarray(value).astype(np.float64)
    return f"{described(value)} from {numbers.min():.6g} to {numbers.max():.6g}"


def holds(value: Any, kind: str) -> bool:
    """Whether a value is an array with NaN or an infinity (``kind`` "nan" or "inf")."""
    test: Any = np.isnan if kind == "nan" else np.isinf
    return is_inexact(value) and bool(test(np.asarray(value)).any())
