"""Every use of a JAX interface that differs between releases, and of packages that come with an extra."""

from __future__ import annotations

import functools
import importlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import serialize_executable
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    get_abstract_mesh,
    use_abstract_mesh,
)
from jaxlib import xla_client


def enable_x64() -> AbstractContextManager[Any]:
    """A scope in which 64-bit types exist; the process-wide setting stays as it is."""
    return jax.enable_x64(True)


@contextmanager
def profiled() -> Iterator[list[bytes]]:
    """A scope that JAX's profiler records; afterwards the list holds what it wrote, an XSpace for each process."""
    written: list[bytes] = []
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's own calls are many
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            yield written
        written += [path.read_bytes() for path in sorted(Path(folder).rglob("*.xplane.pb"))]


def annotation(name: str) -> AbstractContextManager[Any]:
    """A scope on the host that profiles show by name."""
    return jax.profiler.TraceAnnotation(name)


def optional(module: str, extra: str) -> Any:
    """A module that comes with an extra of this package.

    Raises:
        ImportError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise ImportError(f"this needs {module} ({e}): pip install 'onnx2jax[{extra}]'", name=module) from e


_DECIDES = (
    "jax_debug_infs",
    "jax_debug_nans",
    "jax_default_device",
    "jax_default_matmul_precision",
    "jax_disable_jit",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)
_configured = attrgetter(*(name for name in _DECIDES if hasattr(jax.config, name)))


def configuration() -> tuple[Any, ...]:
    """Of how JAX is configured where the caller is, what decides what is compiled."""
    return _configured(jax.config)


def watches() -> bool:
    """Whether JAX is to look at what each operation gives."""
    return any(getattr(jax.config, f"jax_{name}") for name in ("debug_nans", "debug_infs", "disable_jit"))


def has_onednn() -> bool:
    """Whether ``onednn`` serves: its targets are internal to XLA, and other releases read their settings otherwise."""
    return version("jaxlib").startswith("0.10.")


def onednn(target: str, settings: Mapping[str, Any], shape: Sequence[int], *operands: Any) -> Any:
    """What one of oneDNN's functions in jaxlib gives on a CPU: of int8 operands in int32, of others in their type.

    Args:
        target, settings: as XLA calls it.
        shape: of the result.
    """
    dtype = operands[0].dtype
    result = jax.ShapeDtypeStruct(tuple(shape), np.int32 if dtype == np.int8 else dtype)
    text = json.dumps(settings)
    return jax.ffi.ffi_call(target, result, custom_call_api_version=2, legacy_backend_config=text)(*operands)


def scan_constants(scan: Any) -> int:
    """How many operands of a scan, the first of them, each step reads as they are; 0 where ``onednn`` does not serve,
    whose releases write it otherwise."""
    return int(scan.params["num_consts"]) if has_onednn() else 0


def keeps_programs() -> bool:
    """Whether JAX keeps compiled programs for later processes."""
    return bool(jax.config.jax_compilation_cache_dir and jax.config.jax_enable_compilation_cache)  # type: ignore[attr-defined]


def dump_compiled(compiled: Any) -> Any:
    """A compiled function as something that can be pickled, for ``load_compiled`` on such a machine; None at times."""
    try:
        return serialize_executable.serialize(compiled)
    except (NotImplementedError, RuntimeError, ValueError):  # it holds arrays, or code of this process
        return None


def devices_of(compiled: Any) -> list[int]:
    """The numbers of the devices that a compiled function runs on."""
    return [device.id for device in compiled.runtime_executable().local_devices()]


def load_compiled(dumped: Any, device: Any = None) -> Any:
    """The compiled function, on a device; on the first one when left out."""
    code, arguments, results = dumped
    device = device or jax.local_devices()[0]
    return serialize_executable.deserialize_and_load(
        code, arguments, results, backend=device.client, execution_devices=[device]
    )


@functools.cache
def synchronous_device() -> Any:
    """A CPU whose programs run in the thread that calls them; None where this jaxlib makes none.

    Those of ``jax.devices()`` hand programs of more than 1000 operations to a thread of XLA's. JAX 0.10.0 writes an
    error to the terminal, wrongly, for each program that is loaded there.
    """
    if jax.__version_info__ < (0, 10, 2):
        return None
    try:
        client: Any = xla_client.make_cpu_client(asynchronous=False, num_devices=1)
        return client.devices()[0]
    except (AttributeError, TypeError, RuntimeError):
        return None


def erf(x: Any) -> Any:
    """``lax.erf``. Before JAX 0.10.2 that of float32 is 0.9999998 where it should be 1: Gelu of -1e30 was -9e22."""
    y = lax.erf(x)
    if x.dtype != np.float32 or jax.__version_info__ >= (0, 10, 2):
        return y
    return jnp.where(jnp.abs(x) < 4, y, jnp.sign(x))  # the nearest float32 from 3.92 on


def in_32_bits() -> bool:
    """Whether 64-bit types do not exist where the caller is."""
    return jax.dtypes.canonicalize_dtype(np.int64) != np.int64


def auto(mesh: Mesh) -> Mesh:
    """The mesh with axes that the compiler handles; since JAX 0.9 ``jax.make_mesh`` makes Explicit ones."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def context_mesh() -> AbstractMesh:
    """The mesh of ``jax.set_mesh``, without axes where there is none."""
    return get_abstract_mesh()


def in_auto_axes(mesh: Any) -> AbstractContextManager[Any]:
    """A scope in which the mesh's Explicit axes are Auto; those of a ``shard_map`` around stay Manual."""
    explicit = [n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Explicit]
    return use_abstract_mesh(mesh.update_axis_types(dict.fromkeys(explicit, AxisType.Auto)))


@contextmanager
def outside() -> Iterator[None]:
    """A scope without the caller's transformations and meshes: what is computed there can be kept."""
    with jax.core.eval_context(), use_abstract_mesh(AbstractMesh((), ())):
        yield


def reshard(x: Any, sharding: NamedSharding | PartitionSpec) -> Any:
    """The array with another sharding in its type; a spec alone is over the mesh of the context."""
    return jax.sharding.reshard(x, sharding)


def primal(x: Any) -> Any:
    """The value that is differentiated, of what ``jax.grad`` and its like pass outside a jit; all else as it is."""
    while isinstance(x, jax.core.Tracer) and hasattr(x, "primal"):
        x = x.primal
    return x


def in_a_program(x: Any) -> bool:
    """Whether a value is traced for a program, as inside ``jax.jit``, rather than differentiated or batched outside."""
    x = primal(x)
    while isinstance(x, jax.core.Tracer) and hasattr(x, "batch_dim"):
        x = primal(x.val)
    return isinstance(x, jax.core.Tracer)


def flops(compiled: Any) -> float:
    """XLA's count for a compiled program, on one device; 0 where it gives none."""
    found = compiled.cost_analysis() or {}
    return float((found[0] if isinstance(found, list) else found).get("flops", 0))


def spread(x: jax.Array, sharding: Sharding) -> jax.Array:
    """An array of several processes, put where another sharding over the same devices says; all of them call this."""
    return jax.jit(_itself, out_shardings=sharding)(x)


def _itself(x: Any) -> Any:
    return x


def gathered(x: jax.Array) -> np.ndarray:
    """The values of an array of several processes, as NumPy in each; all of them call this."""
    from jax.experimental import multihost_utils

    with enable_x64():
        return np.asarray(x) if x.is_fully_replicated else multihost_utils.process_allgather(x, tiled=True)


def noticeboard() -> Any:
    """What the processes of ``jax.distributed.initialize`` write texts to and read them from; None without it.

    It has ``key_value_set(key, text)``, ``blocking_key_value_get(key, milliseconds)``, ``key_value_dir_get(folder)``
    and ``key_value_delete(key)``.
    """
    from jax._src import distributed

    return distributed.global_state.client


def forward_only(x: Any, error: Exception) -> Any:
    """x; who differentiates it in reverse meets the error."""
    return _forward_only.bind(x, error=error)


def _refuse(_cotangent: Any, _x: Any, *, error: Exception) -> Any:
    raise error


def _jvp(primals: Any, tangents: Any, *, error: Exception) -> Any:
    (x,), (t,) = primals, tangents
    return forward_only(x, error), t if isinstance(t, ad.Zero) else forward_only(t, error)


def _batch(xs: Any, axes: Any, *, error: Exception) -> Any:
    (x,) = xs
    return forward_only(x, error), axes[0]


_forward_only = Primitive("forward_only")
_forward_only.def_impl(lambda x, **_: x)
_forward_only.def_abstract_eval(lambda x, **_: x)
ad.primitive_jvps[_forward_only] = _jvp
ad.primitive_transposes[_forward_only] = _refuse
batching.primitive_batchers[_forward_only] = _batch
mlir.register_lowering(_forward_only, lambda _ctx, x, **_: [x])


def scaled(w: Any, by: Any, shift: Any) -> Any:
    """w * by, to be computed of weights with a look at the values, those of ``shift`` too (see ``optimize/fold``)."""
    return _scaled.bind(w, by, shift)


_scaled = Primitive("scaled")
_scaled.def_impl(lambda w, by, _shift: w * by)
_scaled.def_abstract_eval(lambda w, _by, _shift: w)
mlir.register_lowering(_scaled, mlir.lower_fun(lambda w, by, _shift: w * by, multiple_results=False))


# --------------------------------------------------------------------------------- 64 bits in a caller's 32


def call_in_64_bits(jitted: Any, *args: Any) -> Any:
    """A call of a jitted function, whose first argument is static, that stays in 64-bit mode however it is transformed.

    JAX transforms, transposes and lowers in the mode of the caller, where an inner int64 index would meet an int32
    bound. So the call is one primitive, whose rules work on its jaxpr inside ``enable_x64``. To be called there.
    """
    leaves = jax.tree.leaves(args[1:])
    if not (context_mesh().empty and all(map(_is_plain, leaves))):
        return jitted(*args)
    traced = jitted.trace(*args)
    closed_over = traced.lojax._consts  # tracers of the caller's, in functions that `Model.replace` was given
    results = _in_64_bits.bind(*closed_over, *leaves, jaxpr=traced.lojax.jaxpr)
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), results)


def _is_plain(value: Any) -> bool:
    """Whether nothing but shape and dtype is in the type: no symbolic extent, no mesh of the caller's."""
    aval = jax.typeof(value)
    return all(isinstance(d, int) for d in aval.shape) and aval.sharding.mesh.empty


def _traced(function: Any, avals: Any) -> Any:
    """Its jaxpr, in which ``lojax`` leaves no primitive that JAX would replace later, in the mode of the caller."""
    with enable_x64():
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
        return jax.jit(function).trace(*types).lojax.jaxpr


def _impl(*args: Any, jaxpr: Any) -> Any:
    with enable_x64():
        return _jitted(jaxpr)(*args)


def _of_moving(jaxpr: Any, moving: tuple[int, ...], floating: tuple[int, ...], inputs: Any) -> Any:
    """The jaxpr as a function of its moving inputs: the floating outputs, and all of them."""

    def moved(*some: Any) -> Any:
        every = list(inputs)
        for i, value in zip(moving, some, strict=True):
            every[i] = value
        results = jaxpr_as_fun(jaxpr)(*every)
        return [results[i] for i in floating], results

    return moved


# By identity: jit hands out the same jaxpr for the same types, and these hand on theirs.
@functools.lru_cache(256)
def _jitted(jaxpr: Any) -> Any:
    return jax.jit(jaxpr_as_fun(jaxpr))


@functools.lru_cache(256)
def _linearized(jaxpr: Any, moving: tuple[int, ...], floating: tuple[int, ...]) -> tuple[Any, Any] | None:
    """Two programs: the outputs with what their derivative needs; and from that and tangents those of the outputs.

    None where JAX cannot differentiate in reverse, as with a loop of unknown length.
    """
    structures = []

    def forward(*args: Any) -> Any:
        moved = _of_moving(jaxpr, moving, floating, args)
        _, pull, results = jax.vjp(moved, *(args[i] for i in moving), has_aux=True)
        kept, structure = jax.tree.flatten(pull)
        structures.append(structure)
        return results, kept

    def tangent(*args: Any) -> Any:
        kept, given = args[: -len(moving)], args[-len(moving) :]
        pull = jax.tree.unflatten(structures[0], kept)
        outputs = [jax.ShapeDtypeStruct(jaxpr.out_avals[i].shape, jaxpr.out_avals[i].dtype) for i in floating]
        return jax.linear_transpose(lambda *cotangents: pull(list(cotangents)), *outputs)(given)

    try:
        first = _traced(forward, jaxpr.in_avals)
        kept = first.out_avals[len(jaxpr.out_avals) :]
        return first, _traced(tangent, (*kept, *(jaxpr.in_avals[i] for i in moving)))
    except Exception:
        return None


@functools.lru_cache(256)
def _tangent(jaxpr: Any, moving: tuple[int, ...], floating: tuple[int, ...]) -> Any:
    """The program that takes the inputs, and tangents of the moving ones, and gives those of the floating outputs.

    It computes the values that it needs anew.
    """
    n = len(jaxpr.in_avals)

    def tangent(*args: Any) -> Any:
        moved = _of_moving(jaxpr, moving, floating, args[:n])
        return jax.jvp(moved, tuple(args[i] for i in moving), args[n:], has_aux=True)[1]

    return _traced(tangent, (*jaxpr.in_avals, *(jaxpr.in_avals[i] for i in moving)))


@functools.lru_cache(256)
def _transposed(jaxpr: Any, linear: tuple[int, ...], given: tuple[int, ...]) -> Any:
    """The program that takes the inputs that are not linear, and cotangents of outputs, and gives those of the rest."""
    function, avals = jaxpr_as_fun(jaxpr), jaxpr.in_avals
    known = [i for i in range(len(avals)) if i not in linear]

    def transposed(*args: Any) -> Any:
        fixed = dict(zip(known, args, strict=False))

        def forward(*some: Any) -> list[Any]:
            values = fixed | dict(zip(linear, some, strict=True))
            results = function(*(values[i] for i in range(len(avals))))
            return [results[i] for i in given]

        moving = [jax.ShapeDtypeStruct(avals[i].shape, avals[i].dtype) for i in linear]
        return jax.linear_transpose(forward, *moving)(list(args[len(known) :]))

    return _traced(transposed, [*(avals[i] for i in known), *(jaxpr.out_avals[i] for i in given)])


@functools.lru_cache(256)
def _batched(jaxpr: Any, axes: tuple[int | None, ...], size: Any) -> Any:
    shapes = [
        a.shape if d is None else (*a.shape[:d], size, *a.shape[d:]) for a, d in zip(jaxpr.in_avals, axes, strict=True)
    ]
    avals = [a.update(shape=s) for a, s in zip(jaxpr.in_avals, shapes, strict=True)]
    return _traced(jax.vmap(jaxpr_as_fun(jaxpr), axes), avals)


def _jvp_in_64_bits(primals: Any, tangents: Any, *, jaxpr: Any) -> Any:
    moving = tuple(i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero))
    floating = tuple(i for i, a in enumerate(jaxpr.out_avals) if jnp.issubdtype(a.dtype, jnp.inexact))
    given, linearized = [tangents[i] for i in moving], _linearized(jaxpr, moving, floating)
    if linearized is None:
        results = _in_64_bits.bind(*primals, jaxpr=jaxpr)
        moved = _in_64_bits.bind(*primals, *given, jaxpr=_tangent(jaxpr, moving, floating))
    else:
        every = _in_64_bits.bind(*primals, jaxpr=linearized[0])
        results, kept = every[: len(jaxpr.out_avals)], every[len(jaxpr.out_avals) :]
        moved = _in_64_bits.bind(*kept, *given, jaxpr=linearized[1])
    found = dict(zip(floating, moved, strict=True))
    return results, [found.get(i, ad.Zero(jax.typeof(r).to_tangent_aval())) for i, r in enumerate(results)]


def _transpose_in_64_bits(cotangents: Any, *args: Any, jaxpr: Any) -> Any:
    linear = tuple(i for i, a in enumerate(args) if ad.is_undefined_primal(a))
    given = tuple(i for i, c in enumerate(cotangents) if not isinstance(c, ad.Zero))
    known = [a for a in args if not ad.is_undefined_primal(a)]
    found = _in_64_bits.bind(*known, *(cotangents[i] for i in given), jaxpr=_transposed(jaxpr, linear, given))
    by_place = dict(zip(linear, found, strict=True))
    return [by_place.get(i) for i in range(len(args))]


def _batch_in_64_bits(args: Any, axes: Any, *, jaxpr: Any) -> Any:
    size = next(a.shape[d] for a, d in zip(args, axes, strict=True) if d is not None)
    results = _in_64_bits.bind(*args, jaxpr=_batched(jaxpr, tuple(axes), size))
    return results, [0] * len(results)


def _lower_in_64_bits(ctx: Any, *args: Any, jaxpr: Any) -> Any:
    with enable_x64():
        return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *args)


_in_64_bits = Primitive("in_64_bits")
_in_64_bits.multiple_results = True
_in_64_bits.def_impl(_impl)
_in_64_bits.def_abstract_eval(lambda *_, jaxpr: jaxpr.out_avals)
ad.primitive_jvps[_in_64_bits] = _jvp_in_64_bits
ad.primitive_transposes[_in_64_bits] = _transpose_in_64_bits
batching.primitive_batchers[_in_64_bits] = _batch_in_64_bits
mlir.register_lowering(_in_64_bits, _lower_in_64_bits)
