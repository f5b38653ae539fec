"""Passes in order: options that name them, failures that warn, other platforms, and programs printed after each."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import onnx2jax
from onnx2jax import debug
from onnx2jax.errors import InputTypeError, InputValueError, OptimizationWarning
from onnx2jax.jaxpr import pipeline
from onnx2jax.jaxpr.pipeline import NAMES, Passes, run, run_training, skipped
from onnx2jax.jaxpr.program import Program
from onnx2jax.ops.conv import conv
from onnx2jax.ops.window import window_of
from tests.support.helpers import as_weights
from tests.support.models import mlp, mlp_reference
from tests.support.programs import traced

RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, 3, 5, 7)).astype(np.float32)
W = RNG.normal(size=(4, 3, 3, 3)).astype(np.float32)
SCALE, BIAS = (RNG.normal(size=(1, 4, 1, 1)).astype(np.float32) for _ in range(2))


def network(w: Any, scale: Any, bias: Any, x: Any) -> list[Any]:
    """A convolution and a BatchNormalization; the scale is squared, of weights alone."""
    y = conv(x, w, window_of(x.shape[2:], w.shape[2:], pads=[1] * 4), 1)
    return [y * (scale * scale) + bias]


PLAIN = jax.jit(network)


def primitives(closed: Any) -> list[str]:
    return [e.primitive.name for e in closed.jaxpr.eqns]


def results(options: Passes) -> tuple[list[str], Any]:
    """The primitives of the program after the passes, which is shown to compute what it computed before."""
    hoisted = run(traced(network, W, SCALE, BIAS, X, platform=options.platform), 3, options)
    arguments = hoisted.hoisted_arguments(*as_weights([W, SCALE, BIAS, X]))
    assert hoisted.main is not None
    (ours,) = jax.jit(jaxpr_as_fun(hoisted.main))(*arguments, X)
    np.testing.assert_allclose(ours, PLAIN(W, SCALE, BIAS, X)[0], rtol=1e-4, atol=1e-4)
    return primitives(hoisted.main), arguments


# ------------------------------------------------------------------------------------------------------ options


def test_optimize_may_be_a_bool_or_names_to_skip() -> None:
    assert skipped({"skip": []}) == frozenset()
    assert skipped({"skip": ["microbatch", "onednn"]}) == {"microbatch", "onednn"}


@pytest.mark.parametrize("optimize", ["hoist_params", {"skip": "hoist_params"}, {"only": []}, {}, None, 1])
def test_another_form_of_optimize_is_refused(optimize: Any) -> None:
    with pytest.raises(InputTypeError, match=r"optimize is .*pass True, False, or \{'skip': \['dequantize'\]\}"):
        skipped(optimize)


def test_a_name_of_no_pass_is_refused_with_all_names() -> None:
    with pytest.raises(InputValueError, match=f"'hoist'.*{', '.join(NAMES)}"):
        skipped({"skip": ["microbatch", "hoist"]})


@pytest.mark.parametrize("name", NAMES)
def test_without_a_pass_the_numbers_stay(name: str) -> None:
    results(Passes().skipping(name))


def test_without_layout_assignment_each_convolution_is_lowered_by_itself() -> None:
    for skip, is_lowered in ((("layout_assignment",), True), (("layout_assignment", "lower_convolutions"), False)):
        hoisted = run(traced(network, W, SCALE, BIAS, X), 3, Passes().skipping(*skip))
        assert hoisted.main is not None
        names = primitives(hoisted.main)
        assert ("transpose" in names) is is_lowered and ("conv_general_dilated" in names) is not is_lowered


def test_onednn_is_for_cpus_and_for_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnx2jax.jaxpr.passes.cpu.onednn.is_available", lambda: True)
    assert Passes().onednn
    for options in (Passes(platform="cuda"), Passes(portable=True), Passes().skipping("onednn")):
        assert not options.onednn


# ------------------------------------------------------------------------------------------------------ platforms


def test_other_platforms_fold_and_hoist_alone() -> None:
    names, arguments = results(Passes(platform="rocm"))
    assert sorted({*names} - {"platform_index"}) == ["add", "broadcast_in_dim", "conv_general_dilated"]
    assert [v.shape for v in arguments] == [W.shape, (4,)]


def test_other_platforms_take_their_own_branch() -> None:
    def function(w: Any, x: Any) -> list[Any]:
        return [lax.platform_dependent(x * w, cuda=lambda v: v + 1, tpu=lambda v: v - 1, default=lambda v: -v)]

    closed = jax.make_jaxpr(function)(W, W)
    for platform, name in (("cuda", "add"), ("tpu", "sub"), ("rocm", "neg"), ("cpu", "neg")):
        hoisted = run(closed, 1, Passes(platform=platform))
        assert hoisted.main is not None
        assert [n for n in primitives(hoisted.main) if n != "platform_index"] == ["mul", name]


# ------------------------------------------------------------------------------------------------------ failures


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of a pass that fails in this test."""

    def fail(*_: Any) -> Any:
        raise KeyError("window_strides")

    def failing(passes: tuple[pipeline.Pass, ...]) -> tuple[pipeline.Pass, ...]:
        return tuple(
            p._replace(rewrite=fail, applies=lambda *_: True) if p.name == request.param else p for p in passes
        )

    monkeypatch.setattr(pipeline, "PASSES", failing(pipeline.PASSES))
    monkeypatch.setattr(pipeline, "TRAINING_PASSES", failing(pipeline.TRAINING_PASSES))
    monkeypatch.setattr(pipeline, "_failed", set())
    return str(request.param)


@pytest.mark.parametrize("broken", [p.name for p in pipeline.PASSES], indirect=True)
def test_a_pass_that_fails_warns_once_and_the_numbers_stay(broken: str) -> None:
    with pytest.warns(
        OptimizationWarning, match=rf"the pass '{broken}' failed.* \(KeyError: 'window_strides'\)"
    ) as said:
        results(Passes())
    assert len(said) == 1
    assert (" after fold_batchnorm" in str(said[0].message)) == (broken not in ("dequantize", "fold_batchnorm"))
    results(Passes())  # a second warning would be an error


@pytest.mark.parametrize("broken", [p.name for p in pipeline.TRAINING_PASSES], indirect=True)
def test_a_pass_over_a_training_step_may_fail(broken: str) -> None:
    gradient = jax.grad(lambda w, x: network(w, SCALE, BIAS, x)[0].sum())
    closed = jax.make_jaxpr(gradient)(W, X)
    with pytest.warns(OptimizationWarning, match=f"'{broken}'"):
        changed = run_training(closed, 1, Passes())
    ours, plain = jax.jit(lambda w, x: (jaxpr_as_fun(changed)(w, x)[0], gradient(w, x)))(W, X)
    np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("broken", ["hoist_params"], indirect=True)
@pytest.mark.usefixtures("broken")
def test_a_model_runs_when_a_pass_fails() -> None:
    model = onnx2jax.convert(mlp())
    x = RNG.normal(size=(2, 4)).astype(np.float32)
    with pytest.warns(OptimizationWarning, match="optimize={'skip': "):
        y = model(x)
    np.testing.assert_allclose(y, mlp_reference(model.params, x), rtol=1e-5)
    other = model.with_params({n: 2 * np.asarray(v) for n, v in model.params.items()})
    np.testing.assert_allclose(other(x), mlp_reference(other.params, x), rtol=1e-5)


# ------------------------------------------------------------------------------------------------------ printed


def test_programs_are_printed_after_each_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(debug.VARIABLE, "2")
    run(traced(network, W, SCALE, BIAS, X), 3, Passes(portable=True))
    assert capsys.readouterr().err == ""
    monkeypatch.setenv(debug.VARIABLE, "3")
    run(traced(network, W, SCALE, BIAS, X), 3, Passes(portable=True))
    printed = capsys.readouterr().err
    names = re.findall(r"^onnx2jax: (\w+): \d+ equations before, \d+ after\n(?:let|\{ lambda)", printed, re.MULTILINE)
    assert names == [p.name for p in pipeline.PASSES]


# ------------------------------------------------------------------------------------------------------ parts


def test_a_part_takes_what_it_reads_and_gives_what_others_read() -> None:
    closed = jax.make_jaxpr(lambda x, y: lax.add(lax.exp(lax.mul(x, X)), y))(X, X)
    program = Program.of(closed)
    product, exp, total = program.equations
    part = program.part([product, exp], {*total.inputs})
    assert [part.inputs, part.outputs] == [[program.inputs[0]], list(exp.outputs)]  # X is a constant
    np.testing.assert_array_equal(jaxpr_as_fun(part.closed())(X)[0], lax.exp(lax.mul(X, X)))
    assert program.part([total], {*program.outputs}).constants == {}


def test_inputs_that_nothing_reads_are_left_out() -> None:
    program, places = Program.of(jax.make_jaxpr(lambda _, y, z: (lax.exp(y), lax.neg(z))[1])(X, X, X)).without_unread()
    assert (places, [e.name for e in program.equations]) == ([2], ["neg"])
