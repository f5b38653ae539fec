"""A model's parameters: a read-only mapping, and a pytree."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.tree_util import DictKey

from ..proto.immutable import owned
from ..runtime.params import device_of, is_cpu


class Params(Mapping[str, Any]):
    """Parameters by ONNX name: a read-only mapping, and a pytree.

    ``params | {"w": array}`` and ``dict(params)`` are plain dicts, which ``Model.apply`` accepts too.

    >>> import jax, onnx2jax
    >>> params = onnx2jax.convert(onnx2jax.demo_model()).params
    >>> halved = jax.tree.map(lambda w: w / 2, params)
    >>> halved.keys() == params.keys()
    True
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._values, **other}

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**other, **self._values}

    @property
    def floating(self) -> dict[str, Any]:
        """The floating-point parameters, for ``jax.grad``: a model with packed weights has integer ones, too.

        >>> import jax, numpy as np, onnx2jax
        >>> model = onnx2jax.convert(onnx2jax.demo_model())
        >>> loss = lambda params, x: model.apply(params, x).sum()
        >>> slopes = jax.grad(loss)(model.params.floating, np.zeros((1, 1, 8, 8), np.float32))
        >>> slopes.keys() == model.params.keys()
        True
        """
        return {n: v for n, v in self.items() if jnp.issubdtype(v.dtype, jnp.floating)}

    def __setitem__(self, name: str, value: Any) -> NoReturn:
        raise TypeError(
            f"a model's parameters are read-only; to change {name!r}: model.with_params({{{name!r}: array}})"
        )

    def __repr__(self) -> str:
        rows = [f"  {n}: {v.dtype}{list(v.shape)}" if hasattr(v, "dtype") else f"  {n}: {v!r}" for n, v in self.items()]
        return "\n".join([f"Params of {len(rows)} arrays", *rows[:20], *(["  ..."] if len(rows) > 20 else [])])


def immutable(value: Any) -> Any:
    """A copy that no caller can write, donate or delete; on a CPU a NumPy array."""
    if not isinstance(value, jax.Array):
        return owned(np.asarray(value))
    if isinstance(value, jax.core.Tracer):
        return value
    return owned(np.array(value)) if is_cpu(device_of([value])) else jnp.copy(value)


def _with_keys(params: Params) -> tuple[list[tuple[DictKey, Any]], tuple[str, ...]]:
    return [(DictKey(n), v) for n, v in params.items()], tuple(params)


def _from_flat(names: Iterable[str], values: Iterable[Any]) -> Params:
    return Params(dict(zip(names, values, strict=True)))


jax.tree_util.register_pytree_with_keys(
    Params, _with_keys, _from_flat, lambda params: (tuple(params.values()), tuple(params))
)
export.register_pytree_node_serialization(
    Params,
    serialized_name="onnx2jax.Params",
    serialize_auxdata=lambda names: json.dumps(names).encode(),
    deserialize_auxdata=lambda data: tuple(json.loads(data)),
)
