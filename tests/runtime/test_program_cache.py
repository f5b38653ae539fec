"""Compiled programs in ``cache_dir``: a hit traces nothing, and only equal keys hit."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser

import onnx2jax
from onnx2jax import compat
from onnx2jax.errors import OperatorError
from onnx2jax.eval.interpreter import Settings
from onnx2jax.ir.fingerprint import fingerprint
from onnx2jax.ops.registry import Operator, op, resolve
from onnx2jax.runtime import compile, program_cache
from tests.support.helpers import ROOT

pytestmark = pytest.mark.usefixtures("one_cpu")
IMAGES = np.random.default_rng(0).random((2, 1, 8, 8)).astype(np.float32)


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After it is called, tracing raises."""

    def reject(*_: Any, **__: Any) -> Any:
        raise AssertionError("traced")

    return lambda: monkeypatch.setattr(compile, "evaluate", reject)


def programs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.program"))


def model(body: str, header: str = "float[n, 4] x) => (float[n, m] y", **initializers: Any) -> onnx.ModelProto:
    made = parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g ({header}) {{ {body} }}')
    made.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), n) for n, v in initializers.items())
    return made


W = np.arange(12, dtype=np.float32).reshape(4, 3)
X = np.ones((2, 4), np.float32)


CHILD = """
import collections, json, sys
import jax, numpy as np, onnx2jax
from onnx import parser
from onnx2jax.runtime import compile

folder, which = sys.argv[1:]
evaluate = compile.evaluate
if which == "again":
    compile.evaluate = None
m = onnx2jax.convert(onnx2jax.demo_model(), cache_dir=folder)
x = np.random.default_rng(0).random((2, 1, 8, 8), np.float32)
loaded = [m.run(None, {"image": x})[0].tobytes().hex(), m(x).shape, m.compilations]

# The same without that folder, in JAX's.
compile.evaluate = evaluate
jax.config.update("jax_compilation_cache_dir", folder + "/jax")
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.rpartition("/")[2]]))
model, images = onnx2jax.convert(onnx2jax.demo_model()), np.ones((4, 1, 8, 8), np.float32)
(ran,) = model.run(None, {"image": images})  # which would load the program a second time, on a client of its own
np.testing.assert_allclose(ran, model(images), rtol=1e-5)
staged = parser.parse_model('''<ir_version: 10, opset_import: ["": 21]>
    g (float[n, n] x) => (float[m, k] y) { p = MatMul(x, x)  i = NonZero(p)  j = Cast <to = 1> (i)
    t = Transpose(j)  y = MatMul(j, t) }''')
onnx2jax.convert(staged)(np.eye(3, dtype=np.float32))
print(json.dumps([loaded, events["cache_hits"], events["cache_misses"]]))
"""


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What two processes, one after the other, say of programs in one folder; sets have another order in each."""
    folder, said = tmp_path_factory.mktemp("processes"), []
    for seed, which in (("1", "first"), ("2", "again")):
        command = [sys.executable, "-c", CHILD, str(folder), which]
        environment = {n: v for n, v in os.environ.items() if n != "XLA_FLAGS"} | {"PYTHONHASHSEED": seed}
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said.append(json.loads(done.stdout))
    assert len(programs(folder)) == 1
    return said


def test_another_process_loads_without_tracing(processes: list[Any]) -> None:
    (first, *_), (again, *_) = processes
    assert first == again


def test_another_process_hits_jaxs_persistent_cache(processes: list[Any]) -> None:
    (_, hits, misses), (_, *again) = processes
    assert hits == 0 and misses >= 2  # the demo's program and the product before NonZero
    assert again == [misses, 0]


def test_programs_do_not_contain_weights(tmp_path: Path, untraced: Callable[[], None]) -> None:
    text = "t = Transpose(w)  y = Gemm <transB = 1> (x, t)"
    first, other = (onnx2jax.convert(model(text, w=w), cache_dir=tmp_path) for w in (W, -2 * W))
    np.testing.assert_array_equal(first(X), X @ W)
    untraced()
    np.testing.assert_array_equal(other(X), X @ (-2 * W))
    np.testing.assert_array_equal(other.with_params({"w": W})(X), X @ W)
    assert len(programs(tmp_path)) == 1 and other.compilations == 1


def test_one_process_compiles_ahead_for_another(tmp_path: Path, untraced: Callable[[], None]) -> None:
    m = onnx2jax.convert(onnx2jax.demo_model(), cache_dir=tmp_path)
    assert m.compile(dims={"batch": 3}).compile({"image": (2, 1, 8, 8)}) is m and m.compilations == 2
    untraced()
    again = onnx2jax.convert(onnx2jax.demo_model(), cache_dir=tmp_path)
    np.testing.assert_array_equal(again(IMAGES), m(IMAGES))


TEXT = "h = MatMul(x, w)  k = LeakyRelu <alpha = 0.5> (h)  y = Add(k, b)"
BASE = model(TEXT, w=W, b=np.float32([1]))
OTHERS = {
    "an attribute": model(TEXT.replace("0.5", "0.25"), w=W, b=np.float32([1])),
    "a constant": model(TEXT, w=W, b=np.float32([2])),
    "an operator": model(TEXT.replace("LeakyRelu", "Elu"), w=W, b=np.float32([1])),
    "what an operator reads": model(TEXT.replace("k, b", "h, b"), w=W, b=np.float32([1])),
    "a type": model(TEXT, w=W, b=np.float32([1, 1, 1])),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_graph_is_part_of_the_key(name: str, tmp_path: Path) -> None:
    results = [onnx2jax.convert(m, cache_dir=tmp_path)(-X) for m in (BASE, OTHERS[name])]
    assert len(programs(tmp_path)) == 2
    for m, result in zip((BASE, OTHERS[name]), results, strict=True):
        np.testing.assert_array_equal(result, onnx2jax.convert(m)(-X))


def test_the_order_of_outputs_is_part_of_the_key(tmp_path: Path) -> None:
    ends = ("float[n, m] k, float[n, m] y", "float[n, m] y, float[n, m] k")
    both = [model(TEXT, f"float[n, 4] x) => ({outputs}", w=W, b=np.float32([1])) for outputs in ends]
    first, second = (onnx2jax.convert(m, cache_dir=tmp_path)(X) for m in both)
    np.testing.assert_array_equal([first.k, first.y], [second.k, second.y])
    assert len(programs(tmp_path)) == 2


def test_flags_of_xla_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set()
    for flags in ("", "--xla_cpu_enable_fast_math=true", "--xla_cpu_enable_fast_math=false"):
        monkeypatch.setenv("XLA_FLAGS", flags)
        found.add(program_cache._surroundings.__wrapped__())
    assert len(found) == 3


def test_shapes_options_and_configuration_are_part_of_the_key(tmp_path: Path) -> None:
    m = onnx2jax.convert(BASE, cache_dir=tmp_path)
    wanted = onnx2jax.convert(BASE)(X)
    m(X), m(X[:1]), m(X.astype(np.float32))
    assert len(programs(tmp_path)) == 2
    with jax.default_matmul_precision("highest"):
        np.testing.assert_array_equal(m(X), wanted)  # by the present program, traced again
        np.testing.assert_array_equal(onnx2jax.convert(BASE, cache_dir=tmp_path)(X), wanted)
    assert len(programs(tmp_path)) == 3
    with jax.disable_jit():
        np.testing.assert_array_equal(onnx2jax.convert(BASE, cache_dir=tmp_path)(X), wanted)
    onnx2jax.convert(BASE, cache_dir=tmp_path, optimize=False)(X)
    assert len(programs(tmp_path)) <= 4


def test_a_damaged_program_is_recompiled(tmp_path: Path) -> None:
    wanted = onnx2jax.convert(BASE, cache_dir=tmp_path)(X)
    (path,) = programs(tmp_path)
    whole = path.read_bytes()
    for data in (b"", whole[:100], whole[: len(whole) // 2], b"\x80\x04K\x01."):
        path.write_bytes(data)
        with pytest.warns(UserWarning, match="in cache_dir cannot be used and is recompiled"):
            np.testing.assert_array_equal(onnx2jax.convert(BASE, cache_dir=tmp_path)(X), wanted)
        assert len(path.read_bytes()) > 1000


def test_sequences_of_scalars_differ_by_type_and_bits() -> None:
    graph = onnx2jax.convert(BASE).graph
    kinds: list[Any] = [
        (1, 2), (1, 2.0), (1, "2"), ("1", b"2"), (True, 2), (0.0,), (-0.0,), (None,), (), ("a", "b"), ("ab",),
        ((1, 2),), (2**80,), (float("nan"),),
    ]  # fmt: skip
    digests = [fingerprint(graph, (), kind) for kind in kinds]
    assert None not in digests and len(set(digests)) == len(kinds)
    interned, made = "scalar", "".join(["sca", "lar"])
    assert fingerprint(graph, (), (interned, interned)) == fingerprint(graph, (), [interned, made])


@pytest.mark.skipif(compat.synchronous_device() is None, reason="this jaxlib makes no such device")
def test_a_short_program_is_loaded_for_the_calls_that_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's in their own thread; JAX's, on another client, load it when the first one comes."""
    wanted = onnx2jax.convert(BASE, cache_dir=tmp_path)(X)
    loaded, load = [], compat.load_compiled
    monkeypatch.setattr(compat, "load_compiled", lambda code, *on: loaded.append(*on or [None]) or load(code, *on))
    m = onnx2jax.convert(BASE, cache_dir=tmp_path)
    for _ in range(2):
        np.testing.assert_array_equal(m.run(None, {"x": X})[0], wanted)
    assert loaded == [compat.synchronous_device()]
    for _ in range(2):
        y = m(X)
        np.testing.assert_array_equal(y, wanted)
        assert y.devices() == {jax.devices()[0]}
    assert loaded == [compat.synchronous_device(), None]
    other = m.with_params({n: 2 * v for n, v in m.params.items()})
    np.testing.assert_array_equal(other.run(None, {"x": X})[0], other(X))
    with jax.default_matmul_precision("highest"):
        np.testing.assert_array_equal(m(X), wanted)
    loaded.clear()
    np.testing.assert_array_equal(onnx2jax.convert(BASE, cache_dir=tmp_path)(X), wanted)
    assert loaded == [None], "nothing is loaded for NumPy's calls"


def test_an_unwritable_folder_warns(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="no program can be kept in cache_dir"):
        onnx2jax.convert(BASE, cache_dir=tmp_path / "file")(X)


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For models without ``cache_dir``; an explicit one, None and False take precedence."""
    monkeypatch.setenv("ONNX2JAX_CACHE_DIR", str(tmp_path / "named"))
    onnx2jax.convert(BASE, cache_dir=tmp_path / "own")(X)
    for none in (None, False):
        onnx2jax.convert(BASE, cache_dir=none)(X)
    assert len(programs(tmp_path / "own")) == 1 and not (tmp_path / "named").exists()
    onnx2jax.convert(BASE)(X)
    onnx2jax.session.InferenceSession(BASE.SerializeToString()).run(None, {"x": X})
    assert len(programs(tmp_path / "named")) == 1
    monkeypatch.setenv("ONNX2JAX_CACHE_DIR", "")
    assert onnx2jax.convert(BASE).settings.cache_dir is None


def test_an_unusable_folder_in_the_environment_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ONNX2JAX_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match=r"cache_dir '.*file' \(from ONNX2JAX_CACHE_DIR\)"):
        result = onnx2jax.convert(BASE)(X)
    np.testing.assert_array_equal(result, onnx2jax.convert(BASE, cache_dir=None)(X))


def test_graphs_with_custom_operators_have_no_fingerprint(tmp_path: Path) -> None:
    @op("Own", domain="test.store")
    def own(x):  # type: ignore[no-untyped-def]
        return x + 1

    made = helper.make_model(
        helper.make_graph(
            [helper.make_node("Own", ["x"], ["y"], domain="test.store")],
            "g",
            [helper.make_tensor_value_info("x", 1, [None, 4])],
            [helper.make_tensor_value_info("y", 1, [None, 4])],
        ),
        opset_imports=[helper.make_opsetid("test.store", 1)],
        ir_version=8,
    )
    np.testing.assert_array_equal(onnx2jax.convert(made, cache_dir=tmp_path)(X), X + 1)
    assert fingerprint(onnx2jax.convert(made).graph, ()) is None


LOOP = model(
    "y = Loop (k, , x) <body = b (int64 i, bool c, float[n, 4] v) => (bool d, float[n, 4] w) "
    "{ d = Identity(c)  w = Add(v, v) }>",
    "float[n, 4] x) => (float[n, 4] y",
    k=np.int64(10),
)


def test_max_trips_is_part_of_the_key(tmp_path: Path) -> None:
    onnx2jax.convert(LOOP, cache_dir=tmp_path)(X)
    with pytest.raises(OperatorError, match="max_trips \\(3\\)"):
        onnx2jax.convert(LOOP, max_trips=3, cache_dir=tmp_path)(X)


def test_every_semantic_setting_is_part_of_the_key() -> None:
    graph = onnx2jax.convert(BASE).graph
    decides: dict[str, Any] = {
        "loop_cond": "onnxruntime",
        "max_trips": 3,
        "optimize": False,
        "platform": "tpu",
        "scan_layers": True,
        "skip": frozenset({"layout_assignment"}),
    }
    decides["dtype"] = np.dtype(np.float16)
    changed = decides | {"warn_after": 3, "annotate": True, "background": True, "cache_dir": Path("elsewhere")}
    keys = {name: fingerprint(graph, (), Settings(**{name: value})) for name, value in changed.items()}
    plain = fingerprint(graph, (), Settings())
    assert {name for name, key in keys.items() if key != plain} == decides.keys()
    assert changed.keys() == {f.name for f in dataclasses.fields(Settings)} - {"place", "warned", "is_traced"}
    assert fingerprint(graph, (), Settings(place=object())) is None  # type: ignore[arg-type]


@pytest.fixture
def leaky_relu() -> Iterator[Operator]:
    """The package's LeakyRelu, restored after the test."""
    operator = resolve("", "LeakyRelu", 21)
    assert operator is not None and operator.function is not None
    yield operator
    op("LeakyRelu", since=operator.since, replace=True)(operator.function)


def test_an_operator_wrapping_a_built_in_has_its_own_key(tmp_path: Path, leaky_relu: Operator) -> None:
    """functools.wraps copies __module__, and any function can claim any module."""
    plain = onnx2jax.convert(BASE, cache_dir=tmp_path)(-X)
    own = leaky_relu.function
    assert own is not None

    @functools.wraps(own)
    def doubled(*args: Any, **attributes: Any) -> Any:
        return own(*args, **attributes) * 2

    op("LeakyRelu", since=leaky_relu.since, replace=True)(doubled)
    replaced = onnx2jax.convert(BASE, cache_dir=tmp_path)
    np.testing.assert_array_equal(replaced(-X), 2 * plain - 1)  # y = LeakyRelu(h) + 1
    assert fingerprint(replaced.graph, ()) is None and len(programs(tmp_path)) == 2


def test_a_built_in_registered_under_another_name_has_its_own_key(leaky_relu: Operator) -> None:
    other = resolve("", "Elu", 21)
    assert other is not None and other.function is not None
    op("LeakyRelu", since=leaky_relu.since, replace=True)(other.function)
    assert fingerprint(onnx2jax.convert(BASE).graph, ()) is None


def test_programs_swapped_under_each_others_names_are_recompiled(tmp_path: Path) -> None:
    first, second = BASE, OTHERS["an attribute"]
    wanted = [onnx2jax.convert(m, cache_dir=tmp_path)(-X) for m in (first, second)]
    one, other = programs(tmp_path)
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    for m, result in zip((first, second), wanted, strict=True):
        with pytest.warns(UserWarning, match="holds another program"):
            np.testing.assert_array_equal(onnx2jax.convert(m, cache_dir=tmp_path)(-X), result)
        np.testing.assert_array_equal(onnx2jax.convert(m, cache_dir=tmp_path)(-X), result)


def test_the_checksum_detects_a_changed_byte(tmp_path: Path) -> None:
    wanted = onnx2jax.convert(BASE, cache_dir=tmp_path)(X)
    (path,) = programs(tmp_path)
    whole = bytearray(path.read_bytes())
    whole[-100] ^= 1
    path.write_bytes(whole)
    with pytest.warns(UserWarning, match="checksum"):
        np.testing.assert_array_equal(onnx2jax.convert(BASE, cache_dir=tmp_path)(X), wanted)


FUNCTIONS = parser.parse_model("""
    <ir_version: 10, opset_import: ["": 21, "local": 1]>
    g (float[n, 4] x) => (float[n, 4] y) { h = local.Scale <by = 2.0> (x)  y = local.Scale <by = -3.0> (h) }
    <domain: "local", opset_import: ["": 21]>
    Scale <by> (x) => (y) { c = Constant <value_float: float = @by> ()  y = Mul(x, c) }
""")


def test_models_with_functions_are_cached(tmp_path: Path, untraced: Callable[[], None]) -> None:
    onnx2jax.convert(FUNCTIONS, cache_dir=tmp_path)(X)
    untraced()
    np.testing.assert_array_equal(onnx2jax.convert(FUNCTIONS, cache_dir=tmp_path)(X), -6 * X)


def test_unpicklable_programs_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(*_: Any) -> bytes:
        raise TypeError("cannot pickle it")

    monkeypatch.setattr(program_cache.pickle, "dumps", reject)
    with pytest.warns(UserWarning, match="no program can be kept in cache_dir.*cannot pickle it"):
        np.testing.assert_array_equal(onnx2jax.convert(BASE, cache_dir=tmp_path)(X), X @ W + 1)


KINDS = {
    "texts on the host": (
        model('s = Cast <to = 8> (x)  y = Cast <to = 1> (s)', "float[n, 4] x) => (float[n, 4] y"),
        (X,),
    ),
    "parts around the host": (
        model("p = MatMul(x, x)  i = NonZero(p)  j = Cast <to = 1> (i)  t = Transpose(j)  y = MatMul(j, t)",
              "float[n, n] x) => (float[m, k] y"),
        (np.eye(3, dtype=np.float32),),
    ),
    "a result that is known": (
        model("y = Shape(x)  z = Relu(x)", "float[n, 4] x) => (int64[2] y, float[n, 4] z"),
        (X,),
    ),
    "a sequence": (model("y = SplitToSequence(x)", "float[n, 4] x) => (seq(float[1, 4]) y"), (X,)),
    "a loop": (
        model("y = Loop (k, , x) <body = b (int64 i, bool c, float[n, 4] v) => (bool d, float[n, 4] w) "
              "{ d = Identity(c)  w = Add(v, v) }>", "float[n, 4] x, int64 k) => (float[n, 4] y"),
        (X, np.int64(3)),
    ),
    "64 bits": (model("y = Add(x, x)", "int64[n] x) => (int64[n] y"), (np.array([2**40]),)),
    "int4 weights": (
        model("f = DequantizeLinear(q, s)  y = MatMul(x, f)", q=np.array([[1, -2], [3, 4], [5, 6], [7, -8]]).astype(
            helper.tensor_dtype_to_np_dtype(onnx.TensorProto.INT4)), s=np.float32(0.5)),
        (X,),
    ),
    "int4 arguments": (
        model("r = Gather(q, i)  y = DequantizeLinear(r, s)", "int64[n] i) => (float[n, 16] y", s=np.float32(0.5),
              q=np.arange(-32, 32).reshape(4, 16).astype(helper.tensor_dtype_to_np_dtype(onnx.TensorProto.INT4))),
        (np.array([1, 3]),),
    ),
}  # fmt: skip


def test_run_passes_parameters_of_four_bits() -> None:
    proto, (rows,) = KINDS["int4 arguments"]
    m = onnx2jax.convert(proto)
    np.testing.assert_array_equal(m.run(None, {"i": rows})[0], m(rows))


@pytest.mark.parametrize("name", KINDS)
def test_cached_programs_of_every_kind_of_model_match(name: str, tmp_path: Path) -> None:
    proto, args = KINDS[name]
    wanted = onnx2jax.convert(proto)(*args)
    for _ in range(2):
        m = onnx2jax.convert(proto, cache_dir=tmp_path)
        for _ in range(2):
            jax.tree.map(np.testing.assert_array_equal, m(*args), wanted)


def test_random_numbers_follow_the_key(tmp_path: Path, untraced: Callable[[], None]) -> None:
    proto = model("y = RandomNormalLike(x)", "float[n, 4] x) => (float[n, 4] y")
    first = [onnx2jax.convert(proto, cache_dir=tmp_path)(X, rng=seed) for seed in (0, 1)]
    untraced()
    again = onnx2jax.convert(proto, cache_dir=tmp_path)
    for seed in (0, 1):
        np.testing.assert_array_equal(again(X, rng=seed), first[seed])


def test_transformations_by_the_caller_are_unaffected(tmp_path: Path) -> None:
    for _ in range(2):
        m = onnx2jax.convert(BASE, cache_dir=tmp_path)
        m(X)
        gradient = jax.grad(lambda x, m=m: m(x).sum())(X)
        np.testing.assert_allclose(gradient, np.broadcast_to(W.sum(1), (2, 4)), rtol=1e-6)
    with compat.enable_x64():
        np.testing.assert_array_equal(m(X), onnx2jax.convert(BASE)(X))


def test_threads_share_the_folder(tmp_path: Path) -> None:
    models = [onnx2jax.convert(BASE, cache_dir=tmp_path) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda m: np.asarray(m(X)), models))
    assert all((r == results[0]).all() for r in results) and len(list(tmp_path.iterdir())) == 1
