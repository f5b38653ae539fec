"""Private or changing JAX interfaces: their results, and the package without them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from onnx2jax import compat
from onnx2jax.compat import config, programs, tracing
from onnx2jax.errors import ProcessError
from onnx2jax.jaxpr.passes.any import fold_batchnorm
from onnx2jax.jaxpr.program import Program
from onnx2jax.sharding.processes import exchange
from tests.support.helpers import ROOT, mesh
from tests.support.sources import sources

OPTIONS: dict[str, Any] = {
    "jax_debug_infs": True,
    "jax_debug_nans": True,
    "jax_default_device": "cpu",
    "jax_default_matmul_precision": "highest",
    "jax_default_prng_impl": "rbg",
    "jax_disable_jit": True,
    "jax_enable_x64": True,
    "jax_numpy_dtype_promotion": "standard",  # the suite runs with strict
    "jax_numpy_rank_promotion": "warn",
    "jax_softmax_custom_jvp": False,
    "jax_threefry_partitionable": False,
}
"""Options that affect tracing and compilation, with values other than this process's."""


@pytest.fixture(params=["private", "public"])
def trace_context(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``compat.trace_context`` with JAX's own key and with the fallback."""
    if request.param == "public":
        monkeypatch.delattr("jax._src.config.trace_context")
    return config._trace_context()


@contextmanager
def setting(option: str, value: Any) -> Iterator[None]:
    """One of JAX's options with another value, in this thread where JAX has a scope for it."""
    if hasattr(jax, scope := option.removeprefix("jax_")):
        with getattr(jax, scope)(value):
            yield
        return
    old = getattr(jax.config, option)
    jax.config.update(option, value)
    try:
        yield
    finally:
        jax.config.update(option, old)


@pytest.mark.parametrize("option", OPTIONS)
def test_trace_context_changes_with_each_option(option: str, trace_context: Any) -> None:
    if not hasattr(jax.config, option):
        pytest.skip(f"jax {jax.__version__} has no {option}")
    old, new = getattr(jax.config, option), OPTIONS[option]
    if new == old:
        new = not old
    before = trace_context()
    assert hash(before) == hash(trace_context()) and before == trace_context()
    with setting(option, new):
        assert trace_context() != before
    assert trace_context() == before


def test_trace_context_changes_within_scopes(trace_context: Any) -> None:
    before = trace_context()
    with compat.enable_x64():
        inside = trace_context()
        assert inside != before and inside == trace_context()
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), ("x",))):
        assert trace_context() not in (before, inside)
    assert trace_context() == before


REMOVED = {
    "modules": ["jax.core.eval_context", "jax.interpreters.ad", "jaxlib.xla_client"],
    "functions": [
        "jax.experimental.serialize_executable",
        "jax.interpreters.mlir.lower_fun",
        "jax.stages.Compiled.cost_analysis",
        "jax.stages.Compiled.runtime_executable",
        "jax.extend.core",
    ],
    "registries": ["jax.interpreters.batching.primitive_batchers", "jaxlib.xla_client.make_cpu_client"],
}
"""Private JAX interfaces, grouped so that no removal hides another."""


@pytest.mark.parametrize(
    "group", ["functions", *(pytest.param(g, marks=pytest.mark.extended) for g in ("modules", "registries"))]
)
def test_results_are_right_without_private_interfaces(group: str) -> None:
    command = [sys.executable, "-m", "tests.support.removal", *REMOVED[group]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_functions_that_jax_wraps_in_another_way_are_called_as_they_are() -> None:
    compiled = jax.jit(lambda x: x + 1).lower(np.float32(0)).compile()
    assert compat.unwrapped(compiled)(np.float32(1)) == 2
    assert compat.unwrapped(wrapped := lambda x: compiled(x)) is wrapped


def test_private_interfaces_are_used_in_compat_alone() -> None:
    private = re.compile(r"jax\.(_src|interpreters)\b|jaxlib\b")
    spelled = re.compile(r"\bjax\.(_src|interpreters|lib)\.")
    others = {m: source for m, source in sources().items() if not f"{m}.".startswith("compat.")}
    assert {m: found for m, s in others.items() if (found := [*filter(private.match, s.imports)])} == {}
    assert [m for m, source in others.items() if spelled.search(source.text)] == []


@pytest.fixture
def without_primitives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_rules", lambda _: None)
    tracing._warn_of_32_bits.cache_clear()


@pytest.mark.usefixtures("without_primitives")
def test_without_primitives_calls_use_the_callers_mode_and_warn() -> None:
    assert compat.forward_only(3.0, ValueError()) == 3.0
    assert not compat.has_primitives()
    doubled = jax.jit(lambda factor, x: factor * x, static_argnums=0)
    with pytest.warns(UserWarning, match=r"with jax.enable_x64\(True\)"):
        assert compat.call_in_64_bits(doubled, 2, np.float32(3)) == 6


@pytest.mark.usefixtures("without_primitives")
def test_without_primitives_no_batch_normalization_is_folded() -> None:
    w, x = np.ones((4, 3, 1, 1), np.float32), np.ones((1, 3, 2, 2), np.float32)
    closed = jax.make_jaxpr(lambda w, x: lax.conv(x, w * 2, (1, 1), "VALID") * np.float32(3))(w, x)
    program = Program.of(closed, 1)
    assert fold_batchnorm.fold(program) is program


@pytest.mark.parametrize("private", [True, False])
def test_transformations_are_recognised(monkeypatch: pytest.MonkeyPatch, private: bool) -> None:
    if not private:  # then those alone that trace a program
        monkeypatch.setitem(sys.modules, "jax._src.core", ModuleType("without it"))
    found = []

    def look(_: Any = None) -> Any:
        found.append(compat.is_transformed())
        return jnp.float32(0)

    look()
    jax.jit(look)()
    jax.grad(look)(1.0)
    jax.vmap(look)(jnp.ones(2))
    assert found == [False, True, private, private]


def test_primal_values_are_found_outside_of_programs_only() -> None:
    found = []

    def look(x: Any) -> Any:
        found.append((type(compat.primal(x)), compat.in_a_program()))
        return x.sum()

    x = jnp.ones(3)
    jax.grad(look)(x)
    jax.vmap(look)(x)
    jax.jit(jax.grad(look))(x)
    look(x)
    jax.jit(lambda: look(np.ones(3)))()
    assert [staged for _, staged in found] == [False, False, True, False, True]
    assert not issubclass(found[0][0], jax.core.Tracer) and issubclass(found[2][0], jax.core.Tracer)


def test_devices_of_compiled_programs() -> None:
    x = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh(data=4), PartitionSpec("data")))
    assert compat.devices_of(jax.jit(lambda x: x + 1).lower(x).compile()) == [0, 1, 2, 3]
    assert compat.devices_of(jax.jit(lambda: jnp.ones(3)).lower().compile()) == [0]


def test_without_the_key_value_store_none_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compat.noticeboard() is None  # one process
    monkeypatch.delattr("jax._src.distributed.global_state")
    assert compat.noticeboard() is None


@pytest.mark.parametrize("attribute", ["lojax", "_consts"])
def test_a_traced_function_without_a_private_attribute_is_called(attribute: str) -> None:
    """``lojax`` has a public equal; without closed-over values the call follows the caller's mode."""

    class Traced:
        def __init__(self, traced: Any) -> None:
            self.jaxpr, self.out_info = traced.jaxpr, traced.out_info
            if attribute != "_consts":
                self._consts = traced._consts

    class Jitted:
        def trace(self, *args: Any) -> Any:
            return Traced(jitted.trace(*args))

        def __call__(self, *args: Any) -> Any:
            return jitted(*args)

    jitted = jax.jit(lambda factor, x: factor * x, static_argnums=0)
    tracing._warn_of_32_bits.cache_clear()
    with pytest.warns(UserWarning) if attribute == "_consts" else nullcontext():
        assert jax.jit(lambda x: compat.call_in_64_bits(Jitted(), 2, x))(np.float32(3)) == 6


def test_gathering_in_one_process() -> None:
    assert compat.gathered_texts("é") == ["é"]


def test_programs_without_a_serializer_are_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = jax.jit(lambda x: x + 1).lower(np.float32(1)).compile()
    assert programs.dump_compiled(compiled) is not None
    monkeypatch.delattr("jax.experimental.serialize_executable")
    monkeypatch.setitem(sys.modules, "jax.experimental.serialize_executable", None)
    assert programs.dump_compiled(compiled) is None


def test_without_the_key_value_store_processes_gather_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compat.noticeboard() is None
    assert exchange(mesh(data=2), "text", "a test") == {0: "text"}
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ProcessError, match=r"processes \(0,\) of 2"):
        exchange(mesh(data=2), "text", "a test")


@pytest.mark.parametrize(
    ("platform", "version", "name"),
    [
        ("cpu", "cpu", "cpu"),
        ("tpu", "libtpu", "tpu"),
        ("gpu", "PJRT C API\ncuda 13000", "cuda"),
        ("gpu", "ROCm 7", "rocm"),
    ],
)
def test_platforms_are_named_as_in_choices_by_platform(platform: str, version: str, name: str) -> None:
    """A GPU's device says "gpu", which is no name in ``lax.platform_dependent``: that would take the default."""
    device = SimpleNamespace(platform=platform, client=SimpleNamespace(platform_version=version))
    assert compat.lowering_platform(device) == name


class Uncompilable:
    """A lowered program that XLA compiles without Triton's products alone, or not at all."""

    def __init__(self, message: str) -> None:
        self.message = message

    def compile(self, options: dict[str, Any] | None = None) -> Any:
        if not options:
            raise jax.errors.JaxRuntimeError(self.message)
        return options


def test_products_without_tiles_are_compiled_for_cublas() -> None:
    assert compat.compile_without_device(Uncompilable("unknown option"), cublas=True)
    lowered = Uncompilable("INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot")
    assert compat.compile_without_device(lowered) == {"xla_gpu_enable_triton_gemm": False}
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        compat.compile_without_device(Uncompilable("RESOURCE_EXHAUSTED: too little memory"))


def test_commands_install_the_packages_of_an_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in ("demo", "image", "re2", "text", "tpu", "train", "verify"):
        assert compat.install(extra) == f"pip install {' '.join(f'{name!r}' for name in sorted(extras[extra]))}"
    assert compat.MODULES.keys() <= extras.keys() and not any(map(compat.lacks, compat.MODULES))
