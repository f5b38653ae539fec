"""``InferenceSession`` compared with onnxruntime's: the same calls return the same values."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np
import onnx
import onnxruntime
import pytest

import onnx2jax
from onnx2jax import errors
from onnx2jax.session import InferenceSession

FILE = onnx.parser.parse_model(
    """<ir_version: 10, opset_import: ["": 21, "ai.onnx.ml": 1],
    producer_name: "me", domain: "org.me", model_version: 7,
    doc_string: "what it is", metadata_props: ["k": "v"]>
    g (float[n, 3] x, int64[] at, string[2] s, float16[?, 1] h, bool[1] b)
    => (float[n, 3] y, seq(float) z, string[2] t, float16[m, 1] i, bool[1] c, double[1] w) <float[3] w0 = {1, 2, 3}>
    { y = Mul(x, w0)\n z = SplitToSequence(x)\n t = Identity(s)\n i = Neg(h)\n c = Not(b)\n p = Cast<to = 11>(at)
      one = Constant<value = int64[1] {1}>()\n w = Reshape(p, one) }"""
).SerializeToString()
FEEDS = {
    "x": np.float32([[1, 2, 3], [4, 5, 6]]),
    "at": np.array(4),
    "s": np.array(["a", "b"], object),
    "h": np.ones((2, 1), np.float16),
    "b": np.array([True]),
}


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Resets the warning."""
    monkeypatch.setattr(InferenceSession, "_warned", set())
    yield


@pytest.fixture(scope="module")
def both() -> tuple[InferenceSession, onnxruntime.InferenceSession]:
    return InferenceSession(FILE), onnxruntime.InferenceSession(FILE, providers=["CPUExecutionProvider"])


def test_inputs_and_outputs_are_described_as_by_onnxruntime(
    both: tuple[InferenceSession, onnxruntime.InferenceSession],
) -> None:
    for what in ("get_inputs", "get_outputs"):
        ours, theirs = ([(v.name, v.shape, v.type) for v in getattr(s, what)()] for s in both)
        assert ours == theirs


def test_model_metadata(both: tuple[InferenceSession, onnxruntime.InferenceSession]) -> None:
    ours, theirs = (s.get_modelmeta() for s in both)
    for name in ("producer_name", "graph_name", "domain", "description", "version", "custom_metadata_map"):
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize("names", [None, [], ["w", "y"]])
def test_runs_return_the_same_values(
    both: tuple[InferenceSession, onnxruntime.InferenceSession], names: list[str]
) -> None:
    ours, theirs = (s.run(names, FEEDS) for s in both)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert type(a) is type(b)
        np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("fresh")
def test_providers_are_ignored_with_one_warning() -> None:
    with pytest.warns(UserWarning, match=r"ignores sess_options\.\*, providers") as caught:
        InferenceSession(FILE, onnxruntime.SessionOptions(), ["TensorrtExecutionProvider"])
        session = InferenceSession(FILE, providers=[("CUDAExecutionProvider", {"device_id": 0})])
    assert len(caught) == 1 and caught[0].filename == __file__
    assert session.get_providers() == ["JaxExecutionProvider"]


@pytest.mark.usefixtures("fresh")
def test_default_providers_raise_no_warning() -> None:
    options = onnx2jax.session.SessionOptions()
    options.add_free_dimension_override_by_name("batch", 2)
    options.graph_optimization_level = onnx2jax.session.GraphOptimizationLevel.ORT_DISABLE_ALL
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session = InferenceSession(onnx2jax.demo_model(), options, providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].shape == [2, 1, 8, 8]
    assert not session.model.settings.optimize


@pytest.mark.usefixtures("fresh")
def test_options_without_effect_are_named() -> None:
    options = onnx2jax.session.SessionOptions()
    options.intra_op_num_threads = 1  # type: ignore[attr-defined]
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    with pytest.warns(UserWarning, match=r"ignores sess_options.intra_op_num_threads, sess_options.session.intra"):
        session = InferenceSession(onnx2jax.demo_model(), options)
    assert session.get_session_options() is options
    options.enable_profiling = True
    options.optimized_model_filepath = "small.onnx"
    both = r"enable_profiling, .*: session\.model\.profile.*; onnx2jax\.save\(session\.model\.simplified\(\), path\)"
    with pytest.warns(UserWarning, match=both) as caught:
        InferenceSession(onnx2jax.demo_model(), options)
    assert "threads" not in str(caught[0].message)  # of which the first warning was
    feed, run_options = {"image": np.zeros((1, 1, 8, 8), np.float32)}, onnx2jax.session.RunOptions()
    run_options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    with pytest.warns(UserWarning, match=r"ignores run_options\.memory\.enable_memory_arena_shrinkage$"):
        session.run(None, feed, run_options)


def test_options_are_those_of_onnxruntime() -> None:
    for name in ("SessionOptions", "RunOptions"):
        ours, theirs = (getattr(m, name)() for m in (onnx2jax.session, onnxruntime))
        settable = [n for n in dir(theirs) if n[0] != "_" and not callable(getattr(theirs, n))]
        for option in settable:
            setattr(ours, option, getattr(theirs, option))
        assert {*settable} <= {*vars(ours)}
    with pytest.raises(AttributeError, match="no option 'intra_op_num_thread'; did you mean 'intra_op_num_threads'"):
        onnx2jax.session.SessionOptions().intra_op_num_thread = 1
    with pytest.raises(AttributeError, match="RunOptions has no option 'x': "):
        onnx2jax.session.RunOptions().x = 1


def test_what_the_session_lacks_is_answered_with_what_to_use(
    both: tuple[InferenceSession, onnxruntime.InferenceSession],
) -> None:
    module = onnx2jax.session
    owners = (module, both[0], module.SessionOptions())
    theirs = (onnxruntime, both[1], onnxruntime.SessionOptions())
    for name in module.INSTEAD:
        owner = next(ours for ours, their in zip(owners, theirs, strict=True) if hasattr(their, name) or "bind" in name)
        assert not hasattr(owner, name)
        with pytest.raises(errors.UnsupportedError, match=f"{name} is unsupported: "):
            getattr(owner, name)
    with pytest.raises(AttributeError, match="has no attribute 'InferenceSesion'; did you mean 'InferenceSession'"):
        _ = module.InferenceSesion
    with pytest.raises(AttributeError, match="has no attribute 'get_input'; did you mean 'get_inputs'"):
        _ = both[0].get_input


def test_names_that_choose_a_device() -> None:
    assert onnx2jax.session.get_available_providers() == ["JaxExecutionProvider"]
    assert onnx2jax.session.get_device() == onnxruntime.get_device() == "CPU"


def test_feeds_that_do_not_fit_are_errors(both: tuple[InferenceSession, onnxruntime.InferenceSession]) -> None:
    with pytest.raises(errors.InputTypeError, match="float64"):
        both[0].run(None, {**FEEDS, "x": np.ones((2, 3))})
