"""Programs cut at the calls of their layers: what is compiled, overwritten and shared; results are in test_layers."""

from __future__ import annotations

import threading
from typing import Any

import jax
import numpy as np
import onnx
import pytest

import onnx2jax
from onnx2jax.errors import InputValueError
from onnx2jax.runtime import sections
from onnx2jax.runtime.compile import Subprogram
from onnx2jax.runtime.executable import Executable
from onnx2jax.runtime.sections import Sections
from tests.eval.test_layers import MASK, SMALL, X, assert_close, normal, stack, transformer
from tests.support.models import text_model

Compilations = list[Any]


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Compilations:
    """The programs of sections as they are compiled."""
    found: Compilations = []

    def compiled(jitted: Any, *args: Any, **options: Any) -> Executable:
        found.append(Executable(jitted, *args, **options))
        return found[-1]

    monkeypatch.setattr(sections, "Executable", compiled)
    return found


def cut(model: onnx2jax.Model) -> Sections:
    """The sections of a model that was called with arguments of one signature."""
    (subprogram,) = model._runtime.program._compiled.values()  # type: ignore[union-attr]
    (found,) = subprogram.executables.values()
    assert isinstance(found, Sections)
    return found


def called(proto: onnx.ModelProto, **options: Any) -> onnx2jax.Model:
    return onnx2jax.convert(proto, scan_layers="calls", **options)


@pytest.mark.parametrize("depth", [3, 6])
def test_a_layer_is_compiled_once_for_every_depth(compilations: Compilations, depth: int) -> None:
    model = called(transformer(depth))
    model(X, MASK)
    assert len(compilations) == 1  # nothing is before the first layer, or after the last
    assert len(cut(model).sections) == depth
    model(X, MASK)
    assert len(compilations) == 1
    call, run = model.explain_call(X, MASK).splitlines()[1:3]
    assert "layers  programs called in turn, which repeated layers share" in call and "layers" in run


def test_what_is_before_between_and_after_layers() -> None:
    """Two runs, of which the second reads a value that does not depend on the first, and one that does."""
    first = "".join(SMALL.format(k=k, next=k + 1, activation="Relu") for k in range(3))
    second = "".join(
        f"d{k} = MatMul(x{k}, w{k}) s{k} = Mul(d{k}, side) t{k} = Add(s{k}, e) x{k + 1} = Add(x{k}, t{k}) "
        for k in range(4, 7)
    )
    text = f"a = Exp(x) x0 = Mul(a, a) {first} side = Abs(x) x4 = Neg(x3) e = ReduceMean(x3) {second} y = Sum(x7, a, e)"
    proto = text_model(
        f"two (float[b, l, 8] x, float scale) => (float[b, l, 8] y, float[b, l, 8] a) {{ {text} }}",
        **{f"w{k}": normal(8, 8) for k in (0, 1, 2, 4, 5, 6)},
    )
    plain, model = onnx2jax.convert(proto), called(proto)
    assert_close(tuple(model(X, 0.5)), tuple(plain(X, 0.5)))
    found = cut(model).sections
    assert len(found) == 1 + 3 + 1 + 3 + 1
    assert len({s.executable for s in found}) == 5


@pytest.mark.parametrize("before", ["", "x0 = Exp(x)"])
def test_layers_overwrite_what_no_caller_has(before: str) -> None:
    layers = "".join(SMALL.format(k=k, next=k + 1, activation="Relu") for k in range(3))
    given = "x" if before else "x0"
    text = f"g (float[b, l, 8] {given}, float scale) => (float[b, l, 8] x3) {{ {before} {layers} }}"
    model, x = called(text_model(text, **{f"w{k}": normal(8, 8) for k in range(3)})), jax.numpy.asarray(X)
    ours = np.asarray(model(x, 0.5))
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(model(x, 0.5), ours)
    code = cut(model).sections[-1].compiling.result().as_text()
    assert ("input_output_alias" in code) == bool(before)


def test_results_are_no_memory_of_parameters() -> None:
    proto = stack(3, outputs={"x3": "float[b, l, 8]", "w1": "float[8, 8]"})
    model = called(proto)
    for result in model(X, 0.5):
        result.delete()
    assert_close(tuple(model(X, 0.5)), tuple(onnx2jax.convert(proto)(X, 0.5)))


def test_operands_that_layers_read_the_shape_of_are_not_computed() -> None:
    layer = """c{k} = Mul(past{k}, two)  n{k} = Shape(c{k})  f{k} = Cast <to = 1> (n{k})  m{k} = ReduceMax(f{k})
               d{k} = MatMul(x{k}, w{k})  r{k} = Relu(d{k})  t{k} = Mul(r{k}, m{k})  x{next} = Add(x{k}, t{k})"""
    before = "".join(f"past{k} = Exp(cache{k}) " for k in range(3))
    declared = "float[b, l, 8] x0, " + ", ".join(f"float[p] cache{k}" for k in range(3))
    proto = stack(3, layer, declared=declared, two=np.float32(2))
    nodes = onnx.parser.parse_graph(f"g (float[p] cache0, float[p] cache1, float[p] cache2) => () {{ {before} }}").node
    own = [*nodes, *proto.graph.node]
    del proto.graph.node[:]
    proto.graph.node.extend(own)
    plain, model = onnx2jax.convert(proto), called(proto)
    given = [X, *(normal(5) for _ in range(3))]
    assert_close(model(*given), plain(*given))
    assert len(cut(model).sections) == 3  # no section computes Exp


def test_large_values_of_parameters_alone_keep_one_program(compilations: Compilations) -> None:
    """Computed between layers, they would be copied in each call."""
    before = "".join(f"w{k} = Transpose(v{k}) " for k in range(3))
    own = "d{k} = MatMul(x{k}, w{k}) h{k} = Relu(d{k}) t{k} = Tanh(h{k}) x{next} = Add(x{k}, t{k}) "
    layer = "".join(own.format(k=k, next=k + 1) for k in range(3))
    for width, count in ((8, 3), (1024, 0)):
        proto = text_model(
            f"g (float[b, {width}] x0) => (float[b, {width}] x3) {{ {before} {layer} }}",
            **{f"v{k}": normal(width, width) for k in range(3)},
        )
        x = normal(2, width)
        del compilations[:]
        assert_close(called(proto)(x), onnx2jax.convert(proto)(x), 1e-4)
        assert (len(compilations) > 0) == (count > 0)


def test_another_configuration_compiles_again(compilations: Compilations) -> None:
    model = called(transformer(3))
    expected = model(X, MASK)
    before = len(compilations)
    with jax.default_matmul_precision("float32"):
        assert_close(model(X, MASK), expected)
    assert len(compilations) == 2 * before
    model(X, MASK)
    assert len(compilations) == 2 * before


def test_parameters_of_other_values_share_the_programs(compilations: Compilations) -> None:
    proto, changed = stack(3), {"w1": normal(8, 8)}
    model = called(proto)
    model(X, 0.5)
    before = len(compilations)
    assert_close(model.with_params(changed)(X, 0.5), onnx2jax.convert(proto).with_params(changed)(X, 0.5))
    assert len(compilations) == before


def test_calls_from_threads() -> None:
    model = called(transformer(4))
    inputs = [normal(2, 3, 8) for _ in range(6)]
    found: dict[int, Any] = {}

    def call(k: int) -> None:
        found[k] = np.asarray(model(inputs[k], MASK))

    threads = [threading.Thread(target=call, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k, x in enumerate(inputs):
        np.testing.assert_array_equal(found[k], model(x, MASK))


def test_64_bit_inputs_in_32_bit_mode() -> None:
    proto = stack(3, declared="double[b, l, 8] x0, double scale", outputs={"x3": "double[b, l, 8]"})
    for weight in proto.graph.initializer:
        weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight).astype(float), weight.name))
    plain, model = onnx2jax.convert(proto), called(proto)
    x, scale = X.astype(float), np.float64(0.5)
    feeds = {"x0": x, "scale": scale}
    expected = plain.run(None, feeds)[0]
    for _ in range(3):  # the first call compiles, later ones take the fast path
        for result in (model.run(None, feeds)[0], model(x, scale)):
            assert result.dtype == np.float64
            assert_close(result, expected, 1e-12)


def test_later_calls_take_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    model, feeds = called(stack(3)), {"x0": X, "scale": np.full((), 0.5, np.float32)}
    calls = [lambda: model.run(None, feeds)[0], lambda: model(**feeds)]
    model._runtime.wait(feeds)  # otherwise NumPy evaluates the first
    first = [call() for call in calls]
    monkeypatch.setattr(Subprogram, "__call__", None)
    for call, expected in zip(calls, first, strict=True):
        again = call()
        np.testing.assert_array_equal(again, expected)
        assert type(again) is type(expected)


def test_another_value_of_scan_layers_is_an_error() -> None:
    with pytest.raises(InputValueError, match="'loops'; it is True, False, 'calls' or None"):
        onnx2jax.convert(stack(3), scan_layers="loops")  # type: ignore[arg-type]


def test_results_stay_uncommitted() -> None:
    """As those of one program do: jit may then move them to a mesh."""
    assert not called(stack(3))(X, 0.5).committed
    assert not onnx2jax.convert(stack(3))(X, 0.5).committed
