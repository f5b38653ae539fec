"""Partitions in a row are compiled side by side, and compute what one program computes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from onnx import helper, numpy_helper, parser

import onnx2jax
from onnx2jax.errors import OperatorError
from onnx2jax.runtime import compile, cut, partition
from tests.support.ledger import spent

RNG = np.random.default_rng(0)
W = RNG.normal(size=(3, 3)).astype(np.float32)
X = RNG.normal(size=(2, 3)).astype(np.float32)


@pytest.fixture(autouse=True)
def short_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut, "MOST_COMPILED", 20)
    monkeypatch.setattr(partition, "MOST_FUSED", 20)
    monkeypatch.setattr(compile, "cores", lambda: 3)


def deep(count: int = 50, first: str = "") -> Any:
    """A network of MatMul and Erf, which NumPy lacks, in turn."""
    text = first + " ".join(
        f"x{n + 1} = {'Erf' if n % 2 else 'MatMul'} (x{n}{'' if n % 2 else ', w'})" for n in range(count)
    )
    given, shape = ("x", "float[n, 3]") if first else ("x0", "float[n, 3]")
    proto = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g ({shape} {given}) => (float[n, m] x{count}) {{ {text} }}'
    )
    proto.graph.initializer.append(numpy_helper.from_array(W, "w"))
    return proto


def whole(proto: Any, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """The result of one program."""
    with monkeypatch.context() as patch:
        patch.setattr(partition, "MOST_FUSED", 10**6)
        return np.asarray(onnx2jax.convert(proto)(X))


@pytest.mark.usefixtures("one_cpu")
@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("as_numpy", [True, False])
def test_compilations_overlap(stored: bool, as_numpy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All three programs wait here until the others are being compiled, too."""
    together, compile, compiled = threading.Barrier(3, timeout=60), jax.stages.Lowered.compile, list[str]()

    def waiting(lowered: Any, *args: Any, **options: Any) -> Any:
        compiled.append(threading.current_thread().name)
        together.wait()
        return compile(lowered, *args, **options)

    proto = deep()
    wanted = whole(proto, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", waiting)
        m = onnx2jax.convert(proto, cache_dir=tmp_path if stored else None)
        result = m.run(None, {"x0": X})[0] if as_numpy else m(X)
        assert m.compilations == 3
    assert len(compiled) == 3 and all(name.startswith("onnx2jax-partition") for name in compiled)
    assert not any(t.name in compiled for t in threading.enumerate())
    np.testing.assert_allclose(result, wanted, rtol=1e-4)
    np.testing.assert_array_equal(m(X), result)
    assert len(list(tmp_path.iterdir())) == 3 * stored
    if stored:
        before = spent().compilations
        again = onnx2jax.convert(proto, cache_dir=tmp_path)
        np.testing.assert_array_equal(again(X), result)
        assert spent().compilations == before


def test_partitions_after_a_host_node_and_shapes_that_one_returns() -> None:
    first = "shape = Shape(x)  i = NonZero(x)  p = Transpose(i)  q = Cast <to = 1> (p)  x0 = MatMul(q, m)  "
    proto = deep(first=first)
    proto.graph.node.append(helper.make_node("Expand", ["row", "shape"], ["z"]))
    proto.graph.output.append(helper.make_tensor_value_info("z", 1, None))
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((2, 3), np.float32), "m"))
    proto.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "row"))
    wanted = onnx2jax.convert(proto, optimize=False).run(None, {"x": X})
    m = onnx2jax.convert(proto)
    for _ in range(2):
        for result, expected in zip(m.run(None, {"x": X}), wanted, strict=True):
            np.testing.assert_allclose(result, expected, rtol=1e-4)
    np.testing.assert_array_equal(m.run(None, {"x": X * (X > 0)})[1], wanted[1])


def test_an_interrupted_compilation_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    m = onnx2jax.convert(deep())
    with monkeypatch.context() as patch:
        patch.setattr("onnx2jax.runtime.compile.Executable", interrupt)
        with pytest.raises(KeyboardInterrupt):
            m(X)
    assert not [t for t in threading.enumerate() if t.name.startswith("onnx2jax-partition")]
    np.testing.assert_allclose(m(X), whole(deep(), monkeypatch), rtol=1e-4)


def test_an_error_of_a_later_partition_names_its_node() -> None:
    proto = deep()
    proto.graph.node.append(helper.make_node("MatMul", ["x50", "x50"], ["y"], name="wrong"))
    proto.graph.output[0].name = "y"
    with pytest.raises(OperatorError, match="'wrong'"):
        onnx2jax.convert(proto)(X)
