"""A synthetic network: an ONNX file, its inputs, and the same written by hand in JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.net import Net

OPSET = 17
"""The first opset with LayerNormalization, which exporters used for long."""

ByHand = Callable[..., Any]
"""From prepared weights and the inputs, in the order of the graph, to the outputs."""


@dataclass(frozen=True)
class Network:
    """A network at one batch size.

    Attributes:
        name: the name of its row.
        path: the ONNX file.
        feeds: inputs by name, in the order of the graph.
        by_hand: the same in JAX, written for speed; None if there is none.
        params: its weights, arranged for ``by_hand``.
        tolerance: tolerance of outputs, relative to their largest element.
    """

    name: str
    path: Path
    feeds: Mapping[str, np.ndarray]
    by_hand: ByHand | None = None
    params: Any = None
    tolerance: float = 1e-4


Make = Callable[[Path, int], Network]
"""From a folder for the file and a batch size."""


class Weights:
    """The weights of a network in order of creation, without shapes and axes."""

    def __init__(self, net: Net) -> None:
        self._left: Iterator[np.ndarray] = (v for n, v in net.weights.items() if n.startswith("W_"))

    def __call__(self) -> np.ndarray:
        return next(self._left)

    def several(self, n: int) -> list[np.ndarray]:
        return [next(self._left) for _ in range(n)]


def built(
    net: Net,
    folder: Path,
    name: str,
    feeds: Mapping[str, np.ndarray],
    outputs: Sequence[str],
    by_hand: ByHand,
    params: Any,
    tolerance: float = 1e-4,
) -> Network:
    """The network, its file written."""
    return Network(name, net.save(folder, *outputs), feeds, by_hand, jax.tree.map(jax.numpy.asarray, params), tolerance)
