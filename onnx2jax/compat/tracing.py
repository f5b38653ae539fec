"""What JAX traces: values under transformations, and primitives of our own."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, use_abstract_mesh

from .config import enable_x64, in_32_bits
from .devices import context_mesh


@contextmanager
def outside() -> Iterator[None]:
    """A scope without the caller's transformations and meshes: what is computed there can be kept.

    The fallback for ``jax.core.eval_context`` folds constants too, so programs are traced once more there.
    """
    eager = getattr(jax.core, "eval_context", jax.ensure_compile_time_eval)
    with eager(), use_abstract_mesh(AbstractMesh((), ())):
        yield


def primal(x: Any) -> Any:
    """The value that is differentiated, of what ``jax.grad`` and its like pass outside a jit; all else as it is."""
    return lax.stop_gradient(x) if isinstance(x, jax.core.Tracer) else x


def in_a_program() -> bool:
    """Whether JAX traces a program now, as inside ``jax.jit`` or ``lax.scan``, rather than only derivatives or batches.

    The values at hand do not tell: a function without arguments has no tracers.
    """
    return is_transformed() and isinstance(jax.device_put(0), jax.core.Tracer)


def is_transformed() -> bool:
    """Whether JAX transforms what runs now, by jit, grad, vmap or the like; only jit, where it hides the others.

    Values at hand do not tell: a function that runs now may hold what is traced.
    """
    try:
        from jax._src.core import trace_state_clean
    except ImportError:
        return isinstance(jax.device_put(0), jax.core.Tracer)  # which outside compiles nothing
    return not trace_state_clean()


_functions: list[Any] = []


def functions() -> list[Any]:
    """What jax.numpy, jax.lax and jax.nn hold now: exporters replace functions there while they trace (12 us).

    The same list for as long as nothing is replaced.
    """
    global _functions
    now = [value for module in (jnp, lax, jax.nn) for value in vars(module).values()]
    if now != _functions:
        _functions = now
    return _functions


def repeated_axes(x: Any) -> tuple[int, ...]:
    """Axes along which a traced array repeats one value, as what was broadcast just before; none where JAX hides it."""
    axes = tuple(range(x.ndim))
    try:
        while (equation := x.parent).primitive.name == "convert_element_type":
            (x,) = equation.in_tracers
        if equation.primitive.name != "broadcast_in_dim":
            return ()
        extents, kept = equation.in_tracers[0].shape, equation.params["broadcast_dimensions"]
        varying = {axis for axis, n in zip(kept, extents, strict=True) if not (isinstance(n, int) and n == 1)}
    except (AttributeError, KeyError, IndexError, ValueError):  # of eager calls, transformations, other releases
        return ()
    return tuple(axis for axis in axes if axis not in varying)


def before_repeat(x: Any) -> tuple[Any, tuple[int, ...], int, int] | None:
    """(source, permutation, axis, group) of a traced ``x = jnp.repeat(source.transpose(permutation), group, axis)``.

    The source was broadcast along a new axis, which was merged into the one before it, and perhaps transposed. Casts
    and scalar factors that came after that are applied to the source. None if it was not, or where JAX hides it.
    """
    try:
        equation = x.parent
        primitive, (operand, *others), params = equation.primitive, equation.in_tracers, equation.params
        if primitive.name == "reshape":
            return _before_merge(operand.parent, operand.shape, x.shape)
        if primitive.name not in ("transpose", "convert_element_type", "mul"):
            return None
        others = [other[(0,) * other.ndim] for other in others if len(repeated_axes(other)) == other.ndim]
        if len(others) < len(equation.in_tracers) - 1 or (repeat := before_repeat(operand)) is None:
            return None
        source, order, axis, group = repeat
        if primitive.name == "transpose":
            moved = params["permutation"]
            return source, tuple(order[i] for i in moved), moved.index(axis), group
        return primitive.bind(source, *others, **params), order, axis, group
    except (AttributeError, KeyError, IndexError, ValueError):  # of eager calls, transformations, other releases
        return None


def _before_merge(broadcast: Any, wide: tuple[Any, ...], shape: tuple[Any, ...]) -> Any:
    """``before_repeat`` of an equation's result, of shape ``wide``, that was reshaped."""
    if broadcast.primitive.name != "broadcast_in_dim":
        return None
    (source, *_), kept = broadcast.in_tracers, broadcast.params["broadcast_dimensions"]
    for axis, group in enumerate(wide[1:]):
        narrow = (*wide[: axis + 1], *wide[axis + 2 :])
        if group == 1 or shape != (*wide[:axis], wide[axis] * group, *wide[axis + 2 :]):
            continue
        if kept == tuple(range(len(wide))) and source.shape[axis + 1] == 1:
            source = lax.squeeze(source, [axis + 1])
        elif kept != tuple(i for i in range(len(wide)) if i != axis + 1):
            return None
        return (source, tuple(range(source.ndim)), axis, group) if source.shape == narrow else None
    return None


@functools.cache
def _rules(module: str) -> Any:
    """A module with primitives of our own; None where JAX does not let packages define their rules."""
    try:
        return importlib.import_module(f".{module}", __package__)
    except (ImportError, AttributeError):
        return None


def has_primitives() -> bool:
    """Whether ``scaled`` can be bound."""
    return _rules("primitives") is not None


def forward_only(x: Any, error: Callable[[], Exception]) -> Any:
    """x; its reverse-mode derivative raises a new error, or JAX's own where JAX lets packages define no primitives."""
    primitives = _rules("primitives")
    return primitives.forward_only.bind(x, error=error) if primitives else x


def scaled(w: Any, by: Any, shift: Any, most: Any) -> Any:
    """w * by, to be computed of weights with a look at the values, those of all operands (fold_batchnorm)."""
    return _rules("primitives").scaled.bind(w, by, shift, most)


def call_in_64_bits(jitted: Any, *args: Any) -> Any:
    """A call of a jitted function, whose first argument is static, that stays in 64-bit mode however it is transformed.

    JAX transforms, transposes and lowers in the mode of the caller, where an inner int64 index would meet an int32
    bound. So the call is one primitive, whose rules work on its jaxpr inside ``enable_x64``. To be called there.
    """
    leaves, x64 = jax.tree.leaves(args[1:]), _rules("x64")
    if not (context_mesh().empty and all(map(_is_plain, leaves))):
        return jitted(*args)
    traced = jitted.trace(*args)
    lowered = getattr(traced, "lojax", traced)
    closed_over = getattr(lowered, "_consts", None)  # tracers of the caller's, in functions given to `Model.replace`
    if x64 is None or closed_over is None:
        _warn_of_32_bits()
        return jitted(*args)
    results = x64.in_64_bits.bind(*closed_over, *leaves, jaxpr=lowered.jaxpr)
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), results)


def in_64_bits(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: the function of arrays computes with 64-bit types, however a caller in 32-bit mode transforms it.

    >>> import numpy as np
    >>> large = in_64_bits(lambda x: x.astype(np.int64) * 2**40)
    >>> int(jax.jit(large)(np.int32(3))) == 3 * 2**40
    True
    """
    jitted = jax.jit(lambda _, args, named: function(*args, **named), static_argnums=0)

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        x32 = in_32_bits()
        with enable_x64():
            if not x32:
                return function(*args, **named)
            return call_in_64_bits(jitted, None, *jax.tree.map(jnp.asarray, (args, named)))

    return call


@functools.cache
def _warn_of_32_bits() -> None:
    text = f"JAX {jax.__version__} lets packages define no primitives, so 64-bit values inside a model may fail where "
    text += "the caller is in 32-bit mode: put jax.grad, jax.jit and the call inside `with jax.enable_x64(True):`"
    warnings.warn(text, stacklevel=2)


def _is_plain(value: Any) -> bool:
    """Whether nothing but shape and dtype is in the type: no symbolic extent, no mesh of the caller's."""
    aval = jax.typeof(value)
    return all(isinstance(d, int) for d in aval.shape) and aval.sharding.mesh.empty


_platform: ContextVar[str] = ContextVar("platform", default="")
_keeps_convolutions: ContextVar[bool] = ContextVar("keeps_convolutions", default=False)
PLATFORMS: Final = ("cpu", "cuda", "rocm", "tpu")
"""The names of platforms in ``lax.platform_dependent``."""


@contextmanager
def on_platform(name: str, keeps_convolutions: bool = False) -> Iterator[None]:
    """A context in which programs are traced for one platform; "" for any.

    ``keeps_convolutions``: Conv is ``lax.conv_general_dilated`` on all of them, which passes lower afterwards.
    """
    tokens = _platform.set(name), _keeps_convolutions.set(keeps_convolutions)
    try:
        yield
    finally:
        _platform.reset(tokens[0])
        _keeps_convolutions.reset(tokens[1])


def platform() -> str:
    """The platform for which programs are traced; "" for any."""
    return _platform.get()


def on_any_platform() -> AbstractContextManager[None]:
    """A context for users' functions: JAX keeps the traces of those that are jitted for other callers."""
    return on_platform("")


def keeps_convolutions() -> bool:
    """Whether passes lower the convolutions of what is traced."""
    return _keeps_convolutions.get()


def platform_dependent(*operands: Any, default: Callable[..., Any], **forms: Callable[..., Any]) -> Any:
    """``lax.platform_dependent``, or the form of the platform for which the program is traced."""
    name = platform()
    return forms.get(name, default)(*operands) if name else lax.platform_dependent(*operands, default=default, **forms)
