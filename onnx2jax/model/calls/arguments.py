"""Checks a call's arguments against the declared inputs: names, dtypes, ranks and extents."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ... import compat
from ...errors import InputNameError, InputShapeError, InputTypeError, did_you_mean
from ...eval.values import widened
from ...ir.casts import NARROWER
from ...ops.arrays import is_traced
from ...proto.mapped import owned
from ...proto.types import MapType, OptionalType, SequenceType, TensorType, ValueInfo
from .misfits import of_extents, of_options, of_rank, of_table

Fix = Callable[[str, Sequence[Any], int], str]
"""The end of a message about an input, of a declared shape, that is given with another extent along an axis."""
OF_FILE: Final[Fix] = partial(of_options, (), False)
"""Where no option of ``convert`` fixed the extent."""


def bind(
    inputs: Sequence[ValueInfo],
    optional: Mapping[str, ValueInfo],
    args: Sequence[Any],
    named: Mapping[str, Any],
    dtype: np.dtype | None = None,
    fix: Fix = OF_FILE,
) -> dict[str, Any]:
    """Arguments by input name, checked.

    Args:
        inputs: the required inputs in graph order.
        optional: inputs that have a default, by name; they can be given by name only.
        args: positional arguments, or a single dict of them by name.
        named: arguments by name.
        dtype: the type in which the model computes, which arrays for float32 inputs may have, too; arrays for float64
            inputs may have a narrower one in a model that computes in float64.
        fix: what a message about an extent proposes.

    Raises:
        InputNameError, InputTypeError, InputShapeError: the arguments do not match the inputs.
    """
    feeds = by_name(inputs, optional, args, named)
    missing = [v.name for v in inputs if v.name not in feeds]
    if missing:
        table = of_table(inputs, args)
        raise _mismatch(inputs, f"input{'s' * (len(missing) > 1)} {', '.join(map(repr, missing))} not given", table)
    declared = {v.name: v for v in inputs} | dict(optional)
    extents: dict[str, tuple[Any, str]] = {}
    return {name: _checked(declared[name], value, extents, dtype, fix) for name, value in feeds.items()}


def by_name(
    inputs: Sequence[ValueInfo],
    optional: Iterable[str],
    args: Sequence[Any],
    named: Mapping[str, Any],
    keywords: Sequence[str] = (),
) -> dict[str, Any]:
    """The arguments of ``f(x)``, ``f(x=x)`` or ``f({"x": x})`` by input name; some may be missing.

    ``keywords`` are others of the function, which a message suggests.

    Raises:
        InputNameError, InputTypeError: one is of no input, or given twice.
    """
    if not isinstance(named, Mapping):
        raise InputTypeError(f"inputs must be a dict of arrays by name, not {type(named).__name__}")
    args, named = ((), feeds) if (feeds := as_feeds(inputs, args, named)) is not None else (args, named)
    names = [v.name for v in inputs]
    if len(args) > len(names):
        raise _mismatch(inputs, f"{len(args)} positional arguments given")
    feeds = dict(zip(names, args, strict=False))
    for name, value in named.items():
        if name in feeds:
            raise _mismatch(inputs, f"input {name!r} is given by position and by name")
        if name not in names and name not in optional:
            near = did_you_mean(name, [*names, *optional, *keywords])
            raise _mismatch(inputs, f"there is no input {name!r}", near)
        feeds[name] = value
    return feeds


def _mismatch(inputs: Sequence[ValueInfo], what: str, near: str = "") -> InputNameError:
    return InputNameError(f"{what}; the model's inputs are ({', '.join(map(str, inputs))}){near}")


def as_feeds(inputs: Sequence[ValueInfo], args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any] | None:
    """The inputs by name of a call ``model(feeds)``, whose only argument is a dict; None for other calls."""
    if len(args) != 1 or named or not isinstance(args[0], Mapping):
        return None
    takes_map = inputs and isinstance(inputs[0].type, MapType)
    return None if takes_map or not all(isinstance(n, str) for n in args[0]) else dict(args[0])


def _given_as(kind: TensorType, value: Any, dtype: np.dtype | None) -> TensorType:
    """The declared type, or that of an array in a type that the model casts to its compute dtype."""
    dtype_of_value = getattr(value, "dtype", None)
    if dtype in NARROWER:
        accepted = kind.dtype == dtype and dtype_of_value in NARROWER[dtype]
    else:
        accepted = kind.dtype == np.float32 and dtype_of_value == dtype
    return replace(kind, dtype=np.dtype(dtype_of_value)) if accepted else kind


def _checked(
    declared: ValueInfo, value: Any, extents: dict[str, tuple[Any, str]], dtype: np.dtype | None, fix: Fix
) -> Any:
    kind = declared.type
    if isinstance(kind, OptionalType):
        if value is None:
            return None
        kind = kind.element
    if isinstance(kind, SequenceType):
        if not isinstance(value, list | tuple):
            raise InputTypeError(f"input {declared} takes a list, not {type(value).__name__}")
        # Elements of a sequence may differ in extent, so its dimension variables are not compared.
        return [
            _checked(ValueInfo(f"{declared.name}[{i}]", kind.element), v, {}, dtype, fix) for i, v in enumerate(value)
        ]
    if isinstance(kind, MapType):
        if not isinstance(value, Mapping):
            raise InputTypeError(f"input {declared} takes a dict, not {type(value).__name__}")
        item, keys = kind.value, list(value)
        if kind.key == object:
            keys = as_text(f"input {declared}, its keys", np.array([*keys, None], object)[:-1]).tolist()
        if isinstance(item, TensorType) and item.dtype == object:
            strings = np.array([*value.values(), None], object)[:-1]
            return dict(zip(keys, as_text(f"input {declared}, its values", strings).tolist(), strict=True))
        if not isinstance(item, TensorType):
            return dict(zip(keys, value.values(), strict=True))
        numbers = [item.dtype.type(v) if np.ndim(v) == 0 else v for v in value.values()]
        return dict(zip(keys, numbers, strict=True))
    if not isinstance(kind, TensorType):
        check_readable(value, "input", declared)
        if kind is None and (plain := [v for v in _leaves(value) if not hasattr(v, "dtype")]):
            raise InputTypeError(
                f"input {declared} is given {type(plain[0]).__name__} ({plain[0]!r:.60}), and the model declares no "
                f"element type for it. Give an array of the right type, such as np.float32({value!r:.60})"
            )
        return value
    array = _as_array(declared, kind if dtype is None else _given_as(kind, value, dtype), value)
    if kind.shape is not None:
        _check_shape(declared, kind.shape, array.shape, extents, fix)
    return array


def _leaves(value: Any) -> Iterator[Any]:
    """What a sequence of sequences contains; maps contain nothing that needs a type."""
    if isinstance(value, list | tuple):
        yield from itertools.chain.from_iterable(map(_leaves, value))
    elif not isinstance(value, Mapping):
        yield value


def check_untraced(method: str, *arguments: Any) -> None:
    """Raise InputTypeError if an input of a method that runs the model on values is traced."""
    if is_traced(arguments):
        raise InputTypeError(
            f"{method} runs the model on values, and an input is traced, as inside of jax.jit, grad and vmap: call "
            f"model.{method} outside of it, with arrays"
        )


def check_readable(value: Any, *what: Any) -> None:
    """Raise if an array is masked, or its buffer was donated or deleted; the message names ``what``.

    Raises:
        InputTypeError: naming it and the fix.
    """
    if isinstance(value, np.ma.MaskedArray):
        problem = "a masked array, whose mask would be ignored; give array.filled(value)"
    elif isinstance(value, jax.Array) and not is_traced(value) and value.is_deleted():
        problem = (
            "a deleted array: its buffer was donated (jax.jit(..., donate_argnums=...)) or deleted. Keep a copy before "
            "it is donated: jnp.copy(array)"
        )
    else:
        return
    raise InputTypeError(f"{' '.join(map(str, what))} is {problem}")


def _as_array(declared: ValueInfo, kind: TensorType, value: Any) -> Any:
    if value is None:
        raise InputTypeError(f"input {declared} takes an array, not None")
    if type(value) is not np.ndarray:
        value = _from_other(declared, kind, value)
    if kind.dtype == object and getattr(value.dtype, "kind", "") in "OSTU":
        return as_text(f"input {declared}", np.asarray(value))
    if kind.dtype == np.int64 and value.dtype == np.int32:  # exact, and what JAX makes of integers
        return value.astype(np.int64)
    if value.dtype != kind.dtype:
        fix = f"nothing is cast silently. Convert it: {declared.name}.astype({str(kind.dtype)!r})"
        if isinstance(value, jax.Array) and value.dtype == np.float64 and jnp.issubdtype(kind.dtype, jnp.floating):
            fix += ', or compute in double: model.with_options(dtype="float64")'
        if kind.dtype == object:
            fix = (
                "it takes strings: np.array([...], object). JAX has none: for your own jit, vmap or grad, fix the "
                f"input, convert(..., static={{{declared.name!r}: strings}})"
            )
        actual = f"{value.dtype}{list(value.shape)}"
        raise InputTypeError(f"input {declared} is given as {actual}; {fix}", rule="GR-17")
    return np.asarray(value) if isinstance(value, np.generic) else value


def _from_other(declared: ValueInfo, kind: TensorType, value: Any) -> Any:
    """A value that is no plain array of NumPy's, as an array whose dtype is yet to be checked."""
    check_readable(value, "input", declared)
    if is_key(value):
        raise InputTypeError(f"input {declared} is given a random key; pass it by name: model(..., rng=key)")
    if isinstance(value, jax.Array):
        if value.weak_type:
            # A Python number (or its tangent under jax.jvp) takes the declared precision
            floating = all(jnp.issubdtype(d, jnp.floating) for d in (value.dtype, kind.dtype))
            value = lax.convert_element_type(value, kind.dtype if floating else value.dtype)
        return widened(value, kind.dtype)
    return value if isinstance(value, np.ndarray | np.generic) else from_python(declared, kind, value)


def as_text(what: str, array: np.ndarray) -> np.ndarray:
    """The strings of an array as an object array of str; bytes are decoded as UTF-8.

    Raises:
        InputTypeError: naming the first element that is neither, such as a number or a missing value of pandas.
    """
    texts = array.astype(object, copy=False)
    if array.dtype.kind == "U" or all(type(v) is str for v in texts.flat):
        return texts
    texts = np.empty_like(texts)
    for i, value in enumerate(array.flat):
        try:
            texts.flat[i] = value.decode() if isinstance(value, bytes) else str.__str__(value)
        except UnicodeDecodeError as e:
            raise InputTypeError(f"{what}: element {i} is {value!r:.60}, which is no UTF-8 ({e.reason})") from None
        except TypeError:
            raise InputTypeError(
                f"{what} takes strings, and element {i} is {type(value).__name__} ({value!r:.60}). Convert all: "
                "array.astype(str); of pandas, series.fillna('').astype(str)"
            ) from None
    return texts


def check_names(params: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise if ``params`` is not a mapping of a model's parameters by name.

    Raises:
        InputNameError, InputTypeError: it is not, or names an unknown parameter.
    """
    if not isinstance(params, Mapping):
        raise InputTypeError(f"params must be a dict of arrays by name, like model.params, not {type(params).__name__}")
    if unknown := sorted(params.keys() - known.keys()):
        names = f"{', '.join(map(repr, itertools.islice(known, 8)))}{', ...' if len(known) > 8 else ''}"
        raise InputNameError(
            f"unknown parameters {unknown[:5]}; model.params has {names}{did_you_mean(unknown, known)}"
        )


def fixed_inputs(
    inputs: Sequence[ValueInfo], static: Mapping[str, Any], dtype: np.dtype | None = None
) -> dict[str, np.ndarray]:
    """Read-only copies of the values that ``convert(static=...)`` fixes, by input name; ``dtype`` is as for ``bind``.

    Raises:
        InputError: they do not match the inputs.
    """
    declared = {v.name: v for v in inputs}
    unknown = sorted(set(static) - set(declared))
    if unknown:
        raise InputNameError(
            f"static names {unknown}; the model's inputs are {sorted(declared)}{did_you_mean(unknown, declared)}"
        )
    bound = bind([declared[n] for n in static], {}, tuple(static.values()), {}, dtype)
    return {n: owned(np.asarray(v)) for n, v in bound.items()}


def as_param(name: str, value: Any, kind: TensorType) -> Any:
    """A new value for a parameter, checked; a type without a shape accepts any shape.

    Raises:
        InputTypeError: its dtype differs from the parameter's.
        InputShapeError: its shape differs.
    """
    array = _as_array(ValueInfo(f"params[{name!r}]", kind), kind, value)
    if kind.shape is not None and tuple(array.shape) != kind.shape:
        raise other_shape(name, array.shape, kind.shape)
    return array


def other_shape(name: str, actual: Sequence[int], shape: Sequence[Any]) -> InputShapeError:
    """The error about a new value for a parameter that has another shape."""
    stacked = ""
    if stack_of(actual, shape):
        stacked = (
            "Stacked values of several models are for jax.vmap: jax.vmap(lambda model: model(x))(model), or of a dict "
            "jax.vmap(lambda params: model.apply(params, x))(params). "
        )
    return InputShapeError(
        f"params[{name!r}] must have shape {list(shape)}, not {list(actual)}. {stacked}To change "
        f"shapes on purpose, as for another number of classes: model.with_params({{{name!r}: array, ...}}, "
        "new_shapes=True), which save writes"
    )


def stack_of(actual: Sequence[int], shape: Sequence[Any]) -> tuple[int, ...] | None:
    """The axes before a parameter's own in the shape of stacked values; None for another shape.

    >>> stack_of((3, 4, 8), (4, 8)), stack_of((4, 8), (4, 8)), stack_of((5, 8), (4, 8))
    ((3,), (), None)
    """
    extra = len(actual) - len(shape)
    return tuple(actual[:extra]) if extra >= 0 and tuple(actual[extra:]) == tuple(shape) else None


def is_key(value: Any) -> bool:
    """Whether a value is a typed random key."""
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def as_key(rng: Any) -> Any:
    """A typed random key from a key, key data or a seed.

    Raises:
        InputTypeError: it is none of these, or an array of keys.
    """
    try:
        if not isinstance(rng, int | np.integer | np.ndarray | jax.Array):
            raise TypeError("not an array or integer")
        if not is_key(rng):
            with nullcontext() if is_traced(rng) else compat.outside():  # a caller's jit would trace it in 64-bit mode
                rng = jax.random.wrap_key_data(jnp.asarray(rng)) if np.ndim(rng) else jax.random.key(rng)
    except (TypeError, ValueError) as e:
        raise InputTypeError(f"rng must be a random key, such as jax.random.key(0), not {rng!r:.60}") from e
    if rng.ndim:
        raise InputTypeError(
            f"rng must be one random key, not an array of shape {rng.shape}: pass rng[0], or jax.vmap over the keys"
        )
    return rng


def from_python(declared: ValueInfo, kind: TensorType, value: Any) -> np.ndarray:
    """Numbers and nested lists as an array of the declared dtype, if the conversion is exact."""
    try:
        if kind.dtype == object:  # of ["a", 1.5] NumPy would make strings
            return np.asarray(value, object)
        array = np.asarray(value)
        if hasattr(value, "dtype"):  # an array of another library
            return array
        if array.size and np.result_type(array.dtype, np.int8).kind in "fc" and kind.dtype.kind in "iub":
            raise ValueError
        converted = array.astype(kind.dtype)
        if kind.dtype.kind in "iub" and not np.array_equal(converted, array):
            raise ValueError
        return converted
    except (ValueError, TypeError, OverflowError):
        raise InputTypeError(
            f"input {declared} cannot be converted from {type(value).__name__} ({value!r:.60})"
        ) from None


def _check_shape(
    declared: ValueInfo,
    wanted: tuple[Any, ...],
    shape: tuple[Any, ...],
    extents: dict[str, tuple[Any, str]],
    fix: Fix,
) -> None:
    if len(wanted) != len(shape):
        text = f"input {declared} has rank {len(wanted)}, not {len(shape)} as in shape {list(shape)}"
        raise InputShapeError(text + of_rank(declared.name, wanted, shape))
    for axis, (want, have) in enumerate(zip(wanted, shape, strict=True)):
        if isinstance(want, str):
            bound, first = extents.setdefault(want, (have, declared.name))
            if bound != have:
                raise InputShapeError(
                    f"dimension {want!r} is {bound} in input {first!r} but {have} in input {declared.name!r} "
                    f"(axis {axis} of shape {list(shape)}): one name is one extent",
                    rule="SH-03",
                )
        elif isinstance(want, int) and isinstance(have, int) and want != have:
            end = of_extents(declared.name, wanted, shape) or fix(declared.name, wanted, axis)
            raise InputShapeError(
                f"input {declared} has extent {want} on axis {axis}, but {have} is given: shape {list(shape)}{end}"
            )
