"""Exports a model as portable StableHLO for compilers other than XLA: a function ``main`` of positional arrays."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jax
from jax import export

from ...errors import InputShapeError, UnsupportedError
from ...proto.types import ValueInfo
from ..calls.outputs import exportable

KEY: Final = "rng"
"""The argument of a model that draws random numbers: two words, ``jax.random.key_data`` of a threefry key."""


def function(model: Any, params: Mapping[str, Any], shapes: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """The model as a jitted function of inputs, a key's words if it draws, and weights; and the arguments' types.

    Raises:
        InputShapeError: an extent is symbolic.
    """
    if names := free(shapes):
        raise InputShapeError(
            f"dimensions {', '.join(names)} are free, and a StableHLO program has fixed extents: "
            f"export(..., format='stablehlo', dims={{{', '.join(f'{n!r}: 1' for n in names)}}})"
        )
    count = len(model.inputs)

    def main(*arrays: Any) -> tuple[Any, ...]:
        inputs, arrays = arrays[:count], arrays[count:]
        keys = [jax.random.wrap_key_data(arrays[0], impl="threefry2x32")] if model.graph.draws else []
        weights = dict(zip(params, arrays[len(keys) :], strict=True))
        results = model.apply(weights, *inputs, rng=keys[0] if keys else None)
        returned = exportable(model.outputs, results)
        for info, result in zip(model.outputs, returned, strict=True):
            if isinstance(result, list):
                raise UnsupportedError(
                    f"output {info} is a sequence, and a StableHLO program returns arrays: format='jax' returns it, "
                    "or leave it out, model.cut(outputs=[...])"
                )
        return returned

    types = [jax.ShapeDtypeStruct(shapes[v.name], v.type.dtype) for v in model.inputs]
    words = [jax.ShapeDtypeStruct((2,), "uint32")] if model.graph.draws else []
    return jax.jit(main, keep_unused=True), types + words + [
        jax.ShapeDtypeStruct(v.shape, v.dtype) for v in params.values()
    ]


def about(model: Any, exported: export.Exported, params: Mapping[str, Any]) -> dict[str, Any]:
    """The function's arguments and results, for about.json.

    Raises:
        UnsupportedError: the program calls functions of XLA.
    """
    if calls := sorted(set(re.findall(r"custom_call @([\w.$]+)", exported.mlir_module()))):
        raise UnsupportedError(
            f"the program calls {', '.join(calls)}, which XLA for {exported.platforms[0]} has and StableHLO has not: "
            "export(..., platforms=['tpu']) may do without, and format='jax' keeps them"
        )
    inputs: Sequence[ValueInfo] = model.inputs
    names = [("input", v.name) for v in inputs] + [("key", KEY)] * bool(model.graph.draws)
    names += [("weight", name) for name in params]
    return {
        "function": "main",
        "platform": exported.platforms[0],
        "arguments": [
            {"name": name, "kind": kind, "dtype": aval.dtype.name, "shape": aval.shape}
            for (kind, name), aval in zip(names, exported.in_avals, strict=True)
        ],
        "results": [
            {"name": v.name, "dtype": aval.dtype.name, "shape": aval.shape}
            for v, aval in zip(model.outputs, exported.out_avals, strict=True)
        ],
    }


def free(shapes: Mapping[str, Sequence[Any]]) -> list[str]:
    """The extents that are symbolic, in order."""
    return list(dict.fromkeys(str(d) for shape in shapes.values() for d in shape if not isinstance(d, int)))
