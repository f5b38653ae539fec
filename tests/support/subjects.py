"""Models under test with their expected values, forms of input arrays, and comparison of results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

import onnx2jax
from onnx2jax import compat
from tests.support.confusable import Case, Rng, Steps, Values, real


@dataclass
class Subject:
    """A model derived from a case, and the changes to the case's values.

    Attributes:
        model: the model under test.
        case: the case that it was derived from.
        params: its parameter values.
        fixed: inputs fixed by ``static=``.
        options: other keywords of ``convert``.
        given: values that became inputs by ``cut``.
        outputs: names of its outputs.
        functions: functions of replaced values.
        joined: steps of the joined model.
        folded: parameters that may be folded into others, so that their values must stay.
        is_whole: whether it can be saved.
        jitted: a jit of its ``apply``.
    """

    model: onnx2jax.Model
    case: Case
    params: dict[str, np.ndarray]
    outputs: list[str]
    fixed: dict[str, np.ndarray] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    given: tuple[str, ...] = ()
    functions: Steps = field(default_factory=dict)
    joined: Steps = field(default_factory=dict)
    folded: set[str] = field(default_factory=set)
    is_whole: bool = True
    jitted: Any = None

    @property
    def changeable(self) -> list[str]:
        """Its floating parameters, but for the scales of packed ones, which the reference lacks, and variances."""
        params = {n: v for n, v in self.model.params.items() if n in self.params and n not in self.folded}
        return [n for n, v in params.items() if v.dtype == np.float32 and n not in ("var", "s", "t")]

    @property
    def inner(self) -> list[str]:
        """Names of its node outputs."""
        made = {name for node in self.model.graph.nodes for name in node.outputs}
        return [n for n in self.case.steps if n in made]

    def feeds(self, rng: Rng, size: int) -> dict[str, Any]:
        """Inputs by name."""
        drawn = self.case.feeds(rng, size)
        drawn |= {n: v for n, v in self.fixed.items() if n in drawn}
        inner = self._values(drawn, 0)
        wanted = {v.name for v in self.model.inputs} | {n for n in self.model.optional if n in drawn}
        if self.options.get("rebatch"):
            return {"x": real(rng, size, 4)}
        return {n: np.array(inner[n]) for n in sorted(wanted)}

    @property
    def typed(self) -> set[str]:
        """The inputs that the file declares a type for; cutting makes inputs of values that it does not."""
        return {v.name for v in [*self.model.inputs, *self.model.optional.values()] if v.type is not None}

    def values(self, feeds: Mapping[str, Any], seed: int = 0) -> Values:
        """All values for some inputs."""
        return self._values({**self.fixed, **feeds}, seed)

    def expected(self, feeds: Mapping[str, Any], seed: int = 0) -> list[np.ndarray]:
        """The expected outputs."""
        with np.errstate(all="ignore"):
            if self.options.get("rebatch"):
                rows = [self._values({"x": row[None]}, seed) for row in feeds["x"]]
                return [np.concatenate([v[n] for v in rows]) for n in self.outputs]
            values = self.values(feeds, seed)
            if sizes := self.options.get("max_size"):
                for name, size in sizes.items():
                    count = values[name].shape[-1]
                    values[f"{name}/count"] = np.array(count)
                    values[name] = np.pad(values[name], [(0, 0), (0, size - count)])
            return [np.asarray(values[n]) for n in self.outputs]

    def _values(self, given: Mapping[str, Any], seed: int) -> Values:
        return Values({**self.params, **given, "rng": seed}, {**self.case.steps, **self.joined}, self.functions)


def converted(
    case: Case, *, fixed: Mapping[str, Any] | None = None, options: Mapping[str, Any] | None = None, **others: Any
) -> Subject:
    """A case's model.

    Args:
        case: the case.
        fixed: static inputs, given in arrays that are overwritten afterwards.
        options: keywords of ``convert`` that the results or later rules depend on.
        **others: other keywords.
    """
    static = {n: np.array(v) for n, v in (fixed or {}).items()}
    options = dict(options or {})
    model = onnx2jax.convert(case.proto.SerializeToString(), static=static, **options, **others)
    for array in static.values():
        spoil(array)
    fixed = {n: np.array(v) for n, v in (fixed or {}).items()}
    outputs = [*case.outputs, *(f"{n}/count" for n in options.get("max_size", ()))]
    return Subject(model, case, dict(case.params), outputs, fixed, options)


# ------------------------------------------------------------------------------------------------- forms of arrays


def _aligned(array: np.ndarray) -> np.ndarray:
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    new = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    new[...] = array
    return new


def _strided(array: np.ndarray) -> np.ndarray:
    wide = np.repeat(array, 2, axis=-1) if array.ndim else array.copy()
    return wide[..., ::2] if array.ndim else wide


def _in_jax(array: np.ndarray) -> Any:
    with compat.enable_x64():
        return jnp.array(array)


FORMS: Final[dict[str, Callable[[np.ndarray], Any]]] = {
    "numpy": np.array,
    "aligned": lambda a: a.copy() if a.dtype == object else _aligned(a),
    "read-only": lambda a: _read_only(a.copy()),
    "a view of writable memory": lambda a: _read_only(a.copy()[...]),
    "strided": _strided,
    "reversed": lambda a: a[::-1].copy()[::-1] if a.ndim else a.copy(),
    "fortran": lambda a: np.array(a, order="F"),
    "jax": lambda a: a.copy() if a.dtype == object else _in_jax(a),
    "list": lambda a: a.tolist() if a.size else a.copy(),
}


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def spoil(value: Any) -> None:
    """Write to a NumPy array, through its base if necessary."""
    if not isinstance(value, np.ndarray):
        return
    while isinstance(value, np.ndarray) and not value.flags.writeable:
        if not isinstance(value.base, np.ndarray):
            if value.base is not None or not value.flags.owndata:
                return
            value.flags.writeable = True
        else:
            value = value.base
    if isinstance(value, np.ndarray):
        value[...] = "spoilt" if value.dtype == object else 77


def spoil_all(feeds: Mapping[str, Any]) -> None:
    """Write to the arguments of a call that has returned."""
    for array in feeds.values():
        spoil(array)


# ------------------------------------------------------------------------------------------------------- comparing


def assert_same(results: Sequence[Any], expected: Sequence[np.ndarray], *, exact_types: bool = True) -> None:
    """Assert equal shapes, element types and numbers."""
    assert len(results) == len(expected), (len(results), len(expected))
    for ours, theirs in zip(results, expected, strict=True):
        ours = np.asarray(ours)
        assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
        if theirs.dtype == object:
            assert ours.tolist() == theirs.tolist()
            continue
        assert not exact_types or ours.dtype == theirs.dtype, (ours.dtype, theirs.dtype)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def as_list(results: Any) -> list[Any]:
    """The outputs of a call as a list."""
    return list(results) if isinstance(results, tuple) else [results]


def other_params(rng: Rng, subject: Subject) -> dict[str, np.ndarray]:
    """Other values for some parameters."""
    names = subject.changeable
    chosen = [n for n in names if rng.integers(2)] or names[:1]
    return {n: real(rng, *subject.params[n].shape) for n in chosen}


def deleted(array: jax.Array) -> jax.Array:
    """A deleted array, like after donation."""
    array.delete()
    return array
