"""Arrays that are too large, damaged, deleted or masked raise our own errors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onnx2jax
from onnx2jax.errors import (
    CheckpointError,
    InputError,
    InputTypeError,
    ModelError,
    OnnxError,
    OperatorError,
    RebatchError,
)
from tests.support.models import mlp, text_model

F = np.float32
ADD = "g (float[3] x) => (float[3] y) { y = Add(x, W) }"
ZEROS = np.zeros(3, F)


@pytest.mark.parametrize("node", ["ConstantOfShape", "Expand"])
def test_arrays_larger_than_memory_are_rejected(node: str) -> None:
    inputs = "shape" if node == "ConstantOfShape" else "x, shape"
    m = onnx2jax.convert(text_model(f"g (float[1] x, int64[1] shape) => (float[n] y) {{ y = {node}({inputs}) }}"))
    with pytest.raises(OperatorError, match=f"{node}(.|\n)*1000000000000"):
        m(np.ones(1, F), np.array([10**12]))


def test_padding_larger_than_memory_is_rejected() -> None:
    m = onnx2jax.convert(text_model("g (float[n] x) => (float[m] y) { y = Pad(x, p) }", p=np.array([0, 2**40])))
    with pytest.raises(OperatorError, match="Pad"):
        m(np.ones(2, F))


def test_a_tampered_checkpoint_is_rejected(tmp_path: Path) -> None:
    state = {"a": np.arange(6, dtype=F), "b": np.int64(3)}
    path = onnx2jax.training.save_checkpoint(tmp_path / "state.safetensors", state, position=4)
    data = path.read_bytes()
    for at in range(len(data)):
        for bit in (1, 16, 128):
            path.write_bytes(data[:at] + bytes([data[at] ^ bit]) + data[at + 1 :])
            with contextlib.suppress(CheckpointError):  # the numbers do not show it
                onnx2jax.training.load_checkpoint(path, state)


USES: dict[str, Callable[[Any, Any, Path], Any]] = {
    "step": lambda tuned, state, _: tuned.step(state, {"x": ZEROS}),
    "evaluate": lambda tuned, state, _: tuned.evaluate(state, {"x": ZEROS}),
    "params": lambda tuned, state, _: tuned.params(state),
    "to_model": lambda tuned, state, _: tuned.to_model(state),
    "save_checkpoint": lambda _, state, folder: onnx2jax.training.save_checkpoint(folder / "state.safetensors", state),
    "save_adapter": lambda tuned, state, folder: tuned.save_adapter(folder / "adapter.safetensors", state),
}


def test_a_donated_state_is_rejected(tmp_path: Path, subtests: pytest.Subtests) -> None:
    m = onnx2jax.convert(text_model(ADD, W=np.ones(3, F)))
    tuned = onnx2jax.finetune(m, lambda y, _: (y**2).mean(), optax.sgd(0.1), trainable="*")
    state = tuned.init()
    tuned.step(state, {"x": ZEROS})
    for name, use in USES.items():
        with subtests.test(msg=name), pytest.raises(InputError, match="donated to an earlier step"):
            use(tuned, state, tmp_path)


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "call": lambda m, x: m(x),
    "run": lambda m, x: m.run(None, {"x": x}),
    "apply": lambda m, x: m.apply(m.params, x),
    "apply, as a parameter": lambda m, x: m.apply({"W": x}, ZEROS),
    "with_params": lambda m, x: m.with_params({"W": x})(ZEROS),
    "static": lambda _, x: onnx2jax.convert(text_model(ADD, W=ZEROS), static={"x": x})(),
}


@pytest.mark.parametrize("warm", [False, True], ids=["first", "warm"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("what", ["masked", "donated"])
def test_masked_and_donated_arrays_are_rejected(what: str, way: Callable[[Any, Any], Any], warm: bool) -> None:
    m = onnx2jax.convert(text_model(ADD, W=np.ones(3, F)))
    given = jnp.ones(3, F)
    if warm:
        way(m, given)
        way(m, np.ones(3, F))
    given.delete()
    x = np.ma.masked_array(np.ones(3, F), [True, False, False]) if what == "masked" else given
    with pytest.raises(InputError, match="masked|filled" if what == "masked" else "deleted|donated"):
        way(m, x)
    np.testing.assert_array_equal(m(ZEROS), [1, 1, 1])


def test_donating_an_array_given_as_parameter_is_safe() -> None:
    m, given = onnx2jax.convert(text_model(ADD, W=ZEROS)), jnp.ones(3, F)
    other = m.with_params({"W": given})
    given.delete()
    try:
        y = other(ZEROS)
    except OnnxError:
        return  # rejected by itself
    except RuntimeError as e:
        raise AssertionError("an error of JAX's") from e
    np.testing.assert_array_equal(y, [1, 1, 1])


def test_params_can_be_donated() -> None:
    m = onnx2jax.convert(text_model(ADD, W=ZEROS)).with_params({"W": jnp.ones(3, F)})
    m(ZEROS)
    jax.jit(m.apply, donate_argnums=0)(m.params, ZEROS)
    np.testing.assert_array_equal(m(ZEROS), [1, 1, 1])


@pytest.mark.parametrize("way", ["call", "apply"])
def test_outputs_that_are_parameters_can_be_donated(way: str) -> None:
    m = onnx2jax.convert(text_model("g (float[n] x) => (float[n] y, float[3] W) { y = Neg(x) }", W=np.ones(3, F)))
    calls = {"call": lambda: m(ZEROS), "apply": lambda: m.apply({}, ZEROS)}
    calls[way]()[1].delete()
    for call in calls.values():
        np.testing.assert_array_equal(call()[1], [1, 1, 1])


def test_a_random_key_as_input_is_rejected() -> None:
    with pytest.raises(InputError, match="input x"):
        onnx2jax.convert(text_model(ADD, W=ZEROS))(jax.random.key(0))


@pytest.mark.parametrize("number", [2.5, None])
def test_numbers_for_an_input_of_unknown_type(number: float | None) -> None:
    text = "g (float[n] x) => (float[n] y) { m = ReduceMean<keepdims = 0>(W)  y = Mul(x, m) }"
    m = onnx2jax.convert(text_model(text, W=ZEROS)).cut(inputs=["m"])
    with contextlib.suppress(InputError):
        np.testing.assert_array_equal(m(m=number, x=ZEROS + 1), [2.5] * 3)


def test_saving_replaced_values_raises_model_error(tmp_path: Path) -> None:
    other = onnx2jax.convert(mlp()).replace({"r": jnp.zeros_like})
    with pytest.raises(
        ModelError, match=r"replace.*model\.export\('folder'\).*save\(original, path, params=model\.params\)"
    ):
        onnx2jax.save(other, tmp_path / "m.onnx")
    onnx2jax.save(onnx2jax.convert(mlp()), tmp_path / "m.onnx", params=other.params)


def test_models_without_inputs_or_outputs_under_transformations() -> None:
    """They run as any other; what cannot be asked of them is an error of ours."""
    none = onnx2jax.convert(text_model("g () => (float[2] y) { y = Add(w, w) }", w=F([1, 2])))
    for trace in (
        lambda: jax.jit(none)(),
        lambda: jax.jit(lambda p: none.apply(p))(none.params),
        lambda: jax.vmap(lambda _: none())(ZEROS)[0],
        lambda: jax.checkpoint(none)(),
        lambda: jax.linearize(lambda p: none.apply(p), none.params)[0],
    ):
        np.testing.assert_array_equal(trace(), [2, 4])
    gradient = jax.grad(lambda p: none.apply(p).sum())(none.params)
    np.testing.assert_array_equal(gradient["w"], [2, 2])
    nothing = onnx2jax.convert(text_model("g (float[3] x) => () { y = Add(x, W) }", W=ZEROS))
    for call in (jax.jit(nothing), nothing):
        assert call(ZEROS) == ()
    assert jax.vmap(nothing)(ZEROS[None]) == ()
    with pytest.raises(RebatchError, match="no input has an axis, and so none has a batch: no inputs"):
        onnx2jax.convert(text_model("g () => (float[2] y) { y = Add(w, w) }", w=F([1, 2])), rebatch=True)


def test_strings_in_a_batch_are_refused_with_the_fix() -> None:
    proto = text_model("g (string[n] s, float[3] x) => (float[3] y) { y = Add(x, W) }", W=ZEROS + 1)
    tuned = onnx2jax.finetune(onnx2jax.convert(proto), lambda y, _: y.sum(), optax.sgd(0.1))
    with pytest.raises(InputTypeError, match=r"entry 's' of the batch has dtype object.*static=\{'s': strings\}"):
        tuned.step(tuned.init(), {"s": np.array(["a"], object), "x": ZEROS})
