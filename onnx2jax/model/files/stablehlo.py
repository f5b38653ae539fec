"""Exports a model as portable StableHLO for compilers other than XLA: a function ``main`` of positional arrays."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import jax
from jax import export

from ...errors import InputShapeError, UnsupportedError

KEY: Final = "rng"
"""The argument of a model that draws random numbers: two words, ``jax.random.key_data`` of a threefry key."""


def positional(model: Any, program: Callable[..., dict[str, Any]], types: Sequence[Any]) -> tuple[Any, list[Any]]:
    """A model as a jitted function of inputs, a key's words if it draws, and weights; and the arguments' types.

    Args:
        model: the model.
        program, types: it as a function of weights by name, inputs by name and perhaps a key, and their types.

    Raises:
        InputShapeError: an extent is symbolic.
    """
    weights, inputs, *keys = types
    if names := free({name: kind.shape for name, kind in inputs.items()}):
        raise InputShapeError(
            f"dimensions {', '.join(names)} are free, and a StableHLO program has fixed extents: "
            f"export(..., format='stablehlo', dims={{{', '.join(f'{n!r}: 1' for n in names)}}})"
        )
    words = [jax.ShapeDtypeStruct((2,), "uint32") for _ in keys]

    def main(*arrays: Any) -> tuple[Any, ...]:
        rest = iter(arrays)
        feeds = {name: next(rest) for name in inputs}
        rng = [jax.random.wrap_key_data(next(rest), impl="threefry2x32") for _ in words]
        results = program({name: next(rest) for name in weights}, feeds, *rng)
        for info in model.outputs:
            if isinstance(results[info.name], list):
                raise UnsupportedError(
                    f"output {info} is a sequence, and a StableHLO program returns arrays: format='jax' returns it, "
                    "or leave it out, model.cut(outputs=[...])"
                )
        return tuple(results[v.name] for v in model.outputs)

    return jax.jit(main, keep_unused=True), [*inputs.values(), *words, *weights.values()]


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
    names = [("input", v.name) for v in model.inputs] + [("key", KEY)] * bool(model.graph.draws)
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
