"""The synthetic networks: onnxruntime, hand-written JAX and this compiler agree, or an error is raised."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks import networks, operators, rivals
from benchmarks.networks import Network, convolutional, quantised, transformers, vectors

SMALL: dict[str, Callable[[Path, int], Network]] = {
    "mlp": convolutional.mlp,
    "mobilenet_v2": partial(convolutional.mobilenet_v2, size=32),
    "unet": partial(convolutional.unet, size=16, base=4, depth=2),
    "wide_conv": partial(convolutional.wide_conv, size=(10, 50)),
    "bert": partial(transformers.bert, length=9, layers=1, vocabulary=50),
    "gpt2_step": partial(transformers.gpt2, past=5, length=1, layers=1, vocabulary=50),
    "vit": partial(transformers.vit, size=32, layers=1),
    "svr": partial(vectors.svr, count=20),
    "svc": partial(vectors.svc, classes=4, each=6),
    "lstm": networks.NETWORKS["lstm"],
    "gru": networks.NETWORKS["gru"],
}
COSTLY = ("mobilenet_v2", "gpt2_step", "vit", "gru")
"""Beside another of the same kind."""
CANARIES = ("Conv", "MatMul", "Softmax", "Resize", "MaxPool", "TopK", "NonMaxSuppression", "Gather", "Einsum")
"""The beginning of the names of operators, of each of which one is compared."""


def comparisons() -> list[Any]:
    """All operators, marked but for the canaries."""
    first = {next(o.name for o in operators.OPERATORS if o.name.startswith(kind)) for kind in CANARIES}
    return [
        pytest.param(o, id=o.name, marks=() if o.name in first else pytest.mark.extended) for o in operators.OPERATORS
    ]


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.extended if n in COSTLY else ()) for n in SMALL])
def test_all_rivals_agree(name: str, tmp_path: Path) -> None:
    found = rivals.rivals(SMALL[name](tmp_path, 2))
    assert [*found] == [rivals.OURS, rivals.BY_HAND, rivals.ORT]


@pytest.mark.long
@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", networks.NETWORKS)
def test_all_networks_of_the_benchmark_agree(name: str, tmp_path: Path) -> None:
    assert rivals.rivals(networks.NETWORKS[name](tmp_path, 1))


@pytest.mark.parametrize("make", [pytest.param(quantised.qdq, marks=pytest.mark.extended), quantised.qlinear])
def test_int8_networks_contain_quantised_operators(make: Callable[..., Network], tmp_path: Path) -> None:
    small = {"qdq": "QDQ", "qlinear": "QOperator"}[make.__name__]
    network = quantised._static(tmp_path, 1, small, "small", size=32)
    kinds = {node.op_type for node in onnx.load(network.path).graph.node}
    assert ("QLinearConv" in kinds) is (small == "QOperator")
    assert ("Conv" in kinds) is (small == "QDQ")


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("operator", comparisons())
def test_operators_agree(operator: operators.Operator, tmp_path: Path) -> None:
    assert rivals.rivals(operators.network(operator, tmp_path))


def test_a_mismatch_raises(tmp_path: Path) -> None:
    network = convolutional.mlp(tmp_path, 1)
    wrong = Network(network.name, network.path, network.feeds, lambda _, x: x[:, :10], network.params)
    with pytest.raises(rivals.Mismatch, match=r"MLP 784-128-10: JAX by hand differs from onnxruntime by"):
        rivals.rivals(wrong)


@pytest.mark.parametrize(
    ("ours", "theirs", "difference"),
    [
        ([np.ones(3)], [np.ones(3)], 0.0),
        ([np.ones(3)], [np.ones(2)], np.inf),
        ([np.ones(3)], [np.ones(3), np.ones(3)], np.inf),
        ([np.array([np.nan, 1])], [np.array([0, 1.0])], np.inf),
        ([np.array([np.nan, 1])], [np.array([np.nan, 1.0])], 0.0),
        ([np.array([-np.inf, 1])], [np.array([np.inf, 1.0])], np.inf),
        ([np.array([0, 4.5])], [np.array([0, 5.0])], 0.1),
        ([[{"a": 0.5}, {"b": 2.0}]], [[{"a": 0.5}, {"b": 1.0}]], 1.0),
        ([np.array(["a"], object)], [np.array(["b"], object)], np.inf),
    ],
)
def test_differences(ours: list[np.ndarray], theirs: list[np.ndarray], difference: float) -> None:
    assert rivals.difference(ours, theirs) == pytest.approx(difference)
