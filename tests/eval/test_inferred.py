"""Types of values that a file does not declare: what depends on a free extent is no constant."""

from __future__ import annotations

import onnx2jax
from onnx2jax.eval.known_values import inferred_types, symbolic_types
from tests.support.models import text_model

HALVED = """g (float[1, 1, h] x) => (float[1, 1, u] y) {
    a = MaxPool<kernel_shape = [2], strides = [2]> (x)  b = MaxPool<kernel_shape = [2], strides = [2]> (a)
    y = MaxPool<kernel_shape = [2], strides = [2]> (b)
}"""


def test_an_extent_that_is_halved_three_times_is_no_constant() -> None:
    """The eighths of neighbouring primes are equal."""
    graph = onnx2jax.convert(text_model(HALVED)).graph
    assert [inferred_types(graph)[n].shape for n in "aby"] == [(1, 1, None)] * 3
    assert len({symbolic_types(graph)[n].shape for n in "xaby" if n in symbolic_types(graph)}) >= 3
