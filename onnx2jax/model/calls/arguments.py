"""A call's arguments against the declared inputs: names, element types, ranks, extents, dimension variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...errors import InputNameError, InputShapeError, InputTypeError
from ...proto.types import MapType, OptionalType, SequenceType, TensorType, ValueInfo
from ...runtime.values import widened


def override_dims(inputs: Sequence[ValueInfo], overrides: Mapping[str, int]) -> tuple[ValueInfo, ...]:
    """The inputs with dimension variables replaced by numbers."""
    variables = sorted({d for v in inputs for d in v.shape or () if isinstance(d, str)})
    unknown = sorted(set(overrides) - set(variables))
    if unknown:
        raise InputNameError(f"dim_overrides names {unknown}; the model's dimension variables are {variables}")
    if negative := {n: size for n, size in overrides.items() if size < 0}:
        raise InputShapeError(f"dim_overrides: an extent must not be negative ({negative})")
    return tuple(v.reshaped([overrides.get(d, d) if isinstance(d, str) else d for d in v.shape or ()]) for v in inputs)


def bind(
    inputs: Sequence[ValueInfo], optional: Mapping[str, ValueInfo], args: Sequence[Any], named: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments by input name, checked.

    Args:
        inputs: the required inputs in graph order.
        optional: inputs that have a default, by name; they can be given by name only.
        args: positional arguments.
        named: arguments by name.

    Raises:
        InputNameError, InputTypeError, InputShapeError: the call does not fit the model.
    """
    if not isinstance(named, Mapping):
        raise InputTypeError(f"inputs come as a dict of arrays by name, not {type(named).__name__}")
    names = [v.name for v in inputs]

    def misfit(what: str) -> InputNameError:
        return InputNameError(f"{what}; the model's inputs are ({', '.join(map(str, inputs))})")

    if len(args) > len(names):
        raise misfit(f"{len(args)} positional arguments given")
    given = dict(zip(names, args, strict=False))
    for name, value in named.items():
        if name in given:
            raise misfit(f"input {name!r} is given by position and by name")
        if name not in names and name not in optional:
            raise misfit(f"there is no input {name!r}")
        given[name] = value
    missing = [n for n in names if n not in given]
    if missing:
        raise misfit(f"input{'s' * (len(missing) > 1)} {', '.join(map(repr, missing))} not given")
    declared = {v.name: v for v in inputs} | dict(optional)
    extents: dict[str, tuple[Any, str]] = {}
    return {name: _checked(declared[name], value, extents) for name, value in given.items()}


def _checked(declared: ValueInfo, value: Any, extents: dict[str, tuple[Any, str]]) -> Any:
    kind = declared.type
    if isinstance(kind, OptionalType):
        if value is None:
            return None
        kind = kind.element
    if isinstance(kind, SequenceType):
        if not isinstance(value, list | tuple):
            raise InputTypeError(f"input {declared} takes a list, not {type(value).__name__}")
        # Exporters name extents in which the elements differ, so a name inside a sequence binds nothing.
        return [_checked(ValueInfo(f"{declared.name}[{i}]", kind.element), v, {}) for i, v in enumerate(value)]
    if isinstance(kind, MapType):
        if not isinstance(value, Mapping):
            raise InputTypeError(f"input {declared} takes a dict, not {type(value).__name__}")
        item = kind.value
        if not isinstance(item, TensorType) or item.dtype.hasobject:
            return dict(value)
        return {k: item.dtype.type(v) if np.ndim(v) == 0 else v for k, v in value.items()}
    if not isinstance(kind, TensorType):
        return value
    array = _as_array(declared, kind, value)
    if kind.shape is not None:
        _check_shape(declared, kind.shape, array.shape, extents)
    return array


def _as_array(declared: ValueInfo, kind: TensorType, value: Any) -> Any:
    if value is None:
        raise InputTypeError(f"input {declared} takes an array, not None")
    if isinstance(value, jax.Array):
        if value.weak_type:
            # From a Python number, which has no precision of its own (nor has its tangent under jax.jvp)
            floating = all(jnp.issubdtype(d, jnp.floating) for d in (value.dtype, kind.dtype))
            value = lax.convert_element_type(value, kind.dtype if floating else value.dtype)
        value = widened(value, kind.dtype)
    elif not isinstance(value, np.ndarray | np.generic):
        value = _from_python(declared, kind, value)
    if kind.dtype == object and getattr(value.dtype, "kind", "") in "OUT":
        return np.asarray(value).astype(object, copy=False)
    if value.dtype != kind.dtype:
        cure = f"nothing is cast silently. Convert it: {declared.name}.astype({str(kind.dtype)!r})"
        if kind.dtype == object:
            cure = (
                "it takes strings, np.array([...], object). JAX has none: for a jit, vmap or grad of your own fix the "
            )
            cure += f"input, convert(..., static={{{declared.name!r}: strings}})"
        given = f"{value.dtype}{list(value.shape)}"
        raise InputTypeError(f"input {declared} is given as {given}; {cure}", rule="GR-17")
    return np.asarray(value) if isinstance(value, np.generic) else value


def check_names(params: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse what is no dict of a model's parameters.

    Raises:
        InputNameError, InputTypeError: naming what is wrong.
    """
    if not isinstance(params, Mapping):
        raise InputTypeError(f"params is a dict of arrays by name, as model.params is, not {type(params).__name__}")
    if unknown := sorted(params.keys() - own.keys()):
        raise InputNameError(f"params has {unknown[:5]}, which are no parameters of the model (see model.params)")


def pinned(inputs: Sequence[ValueInfo], static: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Values for inputs that ``convert(static=...)`` fixes.

    Raises:
        InputError: they do not fit the inputs.
    """
    declared = {v.name: v for v in inputs}
    unknown = sorted(set(static) - set(declared))
    if unknown:
        raise InputNameError(f"static names {unknown}; the model's inputs are {sorted(declared)}")
    bound = bind([declared[n] for n in static], {}, tuple(static.values()), {})
    return {n: np.asarray(v) for n, v in bound.items()}


def as_param(name: str, value: Any, kind: TensorType) -> Any:
    """A new value for a parameter of a type, of whatever shape.

    Raises:
        InputTypeError: it has another element type than the model's own.
    """
    return _as_array(ValueInfo(f"params[{name!r}]", kind), kind, value)


def is_key(value: Any) -> bool:
    """Whether a value is a typed random key."""
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def as_key(rng: Any) -> Any:
    """A random key from a key, the data of one, or a seed.

    Raises:
        InputTypeError: it is none of these, or several keys.
    """
    try:
        if not isinstance(rng, int | np.integer | np.ndarray | jax.Array):
            raise TypeError("no array, and no integer")
        if not is_key(rng):
            rng = jax.random.wrap_key_data(jnp.asarray(rng)) if np.ndim(rng) else jax.random.key(rng)
    except (TypeError, ValueError) as e:
        raise InputTypeError(f"rng is {rng!r:.60}, not a random key; make one: jax.random.key(0)") from e
    if rng.ndim:
        raise InputTypeError(f"rng is {rng.shape} random keys, and one is needed: rng[0], or jax.vmap over all of them")
    return rng


def _from_python(declared: ValueInfo, kind: TensorType, value: Any) -> np.ndarray:
    """Numbers and nested lists have no element type of their own: they take the declared one if nothing is lost."""
    try:
        array = np.asarray(value)
        if kind.dtype == object or hasattr(value, "dtype"):  # an array of another library
            return array
        if array.size and np.result_type(array.dtype, np.int8).kind in "fc" and kind.dtype.kind in "iub":
            raise ValueError
        made = array.astype(kind.dtype)
        if kind.dtype.kind in "iub" and not np.array_equal(made, array):
            raise ValueError
        return made
    except (ValueError, TypeError, OverflowError):
        raise InputTypeError(f"input {declared} cannot be made from {type(value).__name__} ({value!r:.60})") from None


def _check_shape(
    declared: ValueInfo, wanted: tuple[Any, ...], shape: tuple[Any, ...], extents: dict[str, tuple[Any, str]]
) -> None:
    if len(wanted) != len(shape):
        raise InputShapeError(f"input {declared} has rank {len(wanted)}, not {len(shape)} as in shape {list(shape)}")
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
            cure = "; if that is the batch, convert(..., rebatch=True) frees it" if axis == 0 and len(shape) > 1 else ""
            raise InputShapeError(
                f"input {declared} has extent {want} on axis {axis}, but {have} is given: shape {list(shape)}{cure}"
            )
