"""A call in 64-bit mode as one primitive inside a caller's 32-bit program. Imported by tracing.py alone."""

from __future__ import annotations

import functools
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.interpreters.ad import Zero, is_undefined_primal, primitive_jvps, primitive_transposes
from jax.interpreters.batching import primitive_batchers
from jax.interpreters.mlir import lower_fun, register_lowering

from .config import enable_x64
from .jaxprs import Primitive, evaluated

in_64_bits = Primitive("in_64_bits")
in_64_bits.multiple_results = True


def _traced(function: Any, avals: Any) -> Any:
    """The jaxpr of a function; ``lojax`` has no primitive left that JAX would replace later, in the caller's mode."""
    with enable_x64():
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals]
        traced = jax.jit(function).trace(*types)
        return getattr(traced, "lojax", traced).jaxpr


def _impl(*args: Any, jaxpr: Any) -> Any:
    # Compiled even in jax.disable_jit: JAX evaluates a jaxpr, which is all there is, without the checks of debug_nans.
    with enable_x64(), jax.disable_jit(False):
        return _jitted(jaxpr)(*args)


def _of_moving(jaxpr: Any, moving: tuple[int, ...], floating: tuple[int, ...], inputs: Any) -> Any:
    """The jaxpr as a function of its moving inputs: the floating outputs, and all of them."""

    def moved(*some: Any) -> Any:
        every = list(inputs)
        for i, value in zip(moving, some, strict=True):
            every[i] = value
        results = evaluated(jaxpr, *every)
        return [results[i] for i in floating], results

    return moved


# By identity: jit hands out the same jaxpr for the same types, and these hand on theirs.
@functools.lru_cache(256)
def _jitted(jaxpr: Any) -> Any:
    return jax.jit(partial(evaluated, jaxpr))


class _Tangent:
    """A linear program whose transpose is at hand, traced where it runs forward: in reverse JAX transposes it back.

    Attributes:
        in_avals, out_avals: of what the derivative needs with the tangents of inputs, and of those of outputs.
    """

    def __init__(self, pull: Any, kept: Any, tangents: Any, outputs: Any) -> None:
        """``pull`` takes what the derivative needs and a list of cotangents, and gives those of inputs."""
        self.in_avals, self.out_avals, self._pull = (*kept, *tangents), outputs, pull
        self._kept, self._pulled = len(kept), dict[tuple[int, ...], Any]()
        self.pulled(tuple(range(len(outputs))))

    def pulled(self, nonzero: tuple[int, ...]) -> Any:
        """The program of what the derivative needs, and of the cotangents of these outputs; the others' are zero."""

        def backward(*args: Any) -> Any:
            given = dict(zip(nonzero, args[self._kept :], strict=True))
            return self._pull(args[: self._kept], [given.get(i, Zero(a)) for i, a in enumerate(self.out_avals)])

        if nonzero not in self._pulled:
            types = *self.in_avals[: self._kept], *(self.out_avals[i] for i in nonzero)
            self._pulled[nonzero] = _traced(backward, types)
        return self._pulled[nonzero]

    @functools.cached_property
    def _closed(self) -> Any:
        def tangent(*args: Any) -> Any:
            kept, tangents = args[: self._kept], args[self._kept :]
            return jax.linear_transpose(lambda *some: evaluated(pulled, *kept, *some), *types)([*tangents])

        pulled = self.pulled(tuple(range(len(self.out_avals))))
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self.out_avals]
        return _traced(tangent, self.in_avals)

    @property
    def jaxpr(self) -> Any:
        return self._closed.jaxpr

    @property
    def consts(self) -> Any:
        return self._closed.consts

    def is_in(self, linear: tuple[int, ...]) -> bool:
        """Whether the tangents are the linear inputs."""
        return linear == tuple(range(self._kept, len(self.in_avals)))


@functools.lru_cache(256)
def _linearized(jaxpr: Any, moving: tuple[int, ...], floating: tuple[int, ...]) -> tuple[Any, _Tangent] | None:
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

    try:
        first = _traced(forward, jaxpr.in_avals)
        kept, outputs = first.out_avals[len(jaxpr.out_avals) :], [jaxpr.out_avals[i] for i in floating]
        tangents = [jaxpr.in_avals[i] for i in moving]
        return first, _Tangent(
            lambda kept, some: jax.tree.unflatten(structures[0], kept)(some), kept, tangents, outputs
        )
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
def _transposed(jaxpr: Any, linear: tuple[int, ...], nonzero: tuple[int, ...]) -> Any:
    """The program that takes the inputs that are not linear, and cotangents of outputs, and gives those of the rest."""
    if isinstance(jaxpr, _Tangent) and jaxpr.is_in(linear):
        with suppress(ValueError):  # JAX 0.10 takes no cotangents that are Zero of what the steps of a scan return
            return jaxpr.pulled(nonzero)
    avals = jaxpr.in_avals
    known = [i for i in range(len(avals)) if i not in linear]

    def transposed(*args: Any) -> Any:
        values = dict(zip(known, args, strict=False))
        moved = _of_moving(jaxpr, linear, nonzero, [values.get(i) for i in range(len(avals))])
        moving = [jax.ShapeDtypeStruct(avals[i].shape, avals[i].dtype) for i in linear]
        return jax.linear_transpose(lambda *some: moved(*some)[0], *moving)(list(args[len(known) :]))

    return _traced(transposed, [*(avals[i] for i in known), *(jaxpr.out_avals[i] for i in nonzero)])


@functools.lru_cache(256)
def _batched(jaxpr: Any, axes: tuple[int | None, ...], size: Any) -> Any:
    shapes = [
        a.shape if d is None else (*a.shape[:d], size, *a.shape[d:]) for a, d in zip(jaxpr.in_avals, axes, strict=True)
    ]
    avals = [ShapedArray(s, a.dtype, a.weak_type) for a, s in zip(jaxpr.in_avals, shapes, strict=True)]
    return _traced(jax.vmap(partial(evaluated, jaxpr), axes), avals)


def _jvp(primals: Any, tangents: Any, *, jaxpr: Any) -> Any:
    moving = tuple(i for i, t in enumerate(tangents) if not isinstance(t, Zero))
    floating = tuple(i for i, a in enumerate(jaxpr.out_avals) if jnp.issubdtype(a.dtype, jnp.inexact))
    tangents, linearized = [tangents[i] for i in moving], _linearized(jaxpr, moving, floating)
    if linearized is None:
        results = in_64_bits.bind(*primals, jaxpr=jaxpr)
        moved = in_64_bits.bind(*primals, *tangents, jaxpr=_tangent(jaxpr, moving, floating))
    else:
        every = in_64_bits.bind(*primals, jaxpr=linearized[0])
        results, kept = every[: len(jaxpr.out_avals)], every[len(jaxpr.out_avals) :]
        moved = in_64_bits.bind(*kept, *tangents, jaxpr=linearized[1])
    by_output = dict(zip(floating, moved, strict=True))
    return results, [by_output.get(i, Zero(ShapedArray(r.shape, jax.dtypes.float0))) for i, r in enumerate(results)]


def _transpose(cotangents: Any, *args: Any, jaxpr: Any) -> Any:
    linear = tuple(i for i, a in enumerate(args) if is_undefined_primal(a))
    nonzero = tuple(i for i, c in enumerate(cotangents) if not isinstance(c, Zero))
    known = [a for a in args if not is_undefined_primal(a)]
    pulled = in_64_bits.bind(*known, *(cotangents[i] for i in nonzero), jaxpr=_transposed(jaxpr, linear, nonzero))
    by_input = dict(zip(linear, pulled, strict=True))
    return [by_input.get(i) for i in range(len(args))]


def _batch(args: Any, axes: Any, *, jaxpr: Any) -> Any:
    size = next(a.shape[d] for a, d in zip(args, axes, strict=True) if d is not None)
    results = in_64_bits.bind(*args, jaxpr=_batched(jaxpr, tuple(axes), size))
    return results, [0] * len(results)


def _lower(ctx: Any, *args: Any, jaxpr: Any) -> Any:
    with enable_x64():
        return lower_fun(partial(evaluated, jaxpr), multiple_results=True)(ctx, *args)


in_64_bits.def_impl(_impl)
in_64_bits.def_abstract_eval(lambda *_, jaxpr: jaxpr.out_avals)
primitive_jvps[in_64_bits] = _jvp
primitive_transposes[in_64_bits] = _transpose
primitive_batchers[in_64_bits] = _batch
register_lowering(in_64_bits, _lower)
