"""Explains which path a call takes through the runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import jax

from ...ops.arrays import is_traced
from ..calls import buckets
from ..calls.arguments import by_name
from .table import table


def explain_call(model: Any, args: Sequence[Any], named: Mapping[str, Any], rng: Any) -> str:
    """The tables of ``Model.explain_call``."""
    arguments = by_name(model.inputs, model.optional, args, named)
    values = model._bind((), arguments, rng)[0]
    jax.block_until_ready(model(arguments, rng=rng))
    model.run(None, values, rng=rng)
    runtime, program = model._runtime, model._runtime.program
    partitions = program.rows()
    why_of = WHY if any(kind == "host" for kind, *_ in partitions) else {**WHY, "host": SPLIT}
    rows = [("call", "path", "why")]
    for title, feeds, as_numpy in (("model(...)", arguments, False), ("model.run", values, True)):
        signature, _ = runtime.signature((), feeds, as_numpy)
        bound = runtime.params.bound.get(signature)
        path, why = (bound.path, why_of[bound.path]) if bound else ("full", _reason(model, signature, values, rng))
        rows.append((title, path, why))
    stages = [("partition", "nodes", "path", "why here")]
    bodies = [body for body, _ in program.stages()] if hasattr(program, "stages") else repeat(None)
    for (kind, nodes, why, *_), body in zip(partitions, bodies, strict=False):
        paths = {b.path for key, b in runtime.params.bound.items() if key and key.callee.graph is body}
        stages.append((kind, nodes, ", ".join(sorted(paths)) or ("host" if kind == "host" else "compiled"), why))
    return f"{table(rows)}\n\n{table(stages)}"


WHY = {
    "numpy": "dispatch would cost more than the computation",
    "inline": "a short program, run in the caller's thread",
    "compiled": "one program, called directly for this signature",
    "layers": "programs called in turn, which repeated layers share",
    "host": "nodes run by NumPy around compiled partitions",
}
SPLIT = "compiled partitions, called in turn"
"""Why a call whose partitions are all compiled runs them as steps on the host."""


def _reason(model: Any, signature: Any, values: Mapping[str, Any], rng: Any) -> str:
    """Why a call takes the full path."""
    spec = model.spec
    reasons = {
        "the call is traced": is_traced(values, rng),
        "the model is on a mesh": spec.placement is not None,
        "a random key is given": rng is not None,
        "the model draws random numbers": spec.graph.draws,
        "bucket= pads inputs": bool(buckets.pad(model.inputs, dict(values), spec.bucket)[1]),
        "max_size= counts results": bool(spec.max_size),
        "an argument is converted, or is no array on one device": signature is None,
        "inputs are specialised on": bool(model._runtime.specialised),
        "optimize=False": not spec.settings.optimize,
        "NumPy, until a thread has compiled it (background_compile)": model._runtime.is_evaluated(signature),
    }
    return next((reason for reason, holds in reasons.items() if holds), "the model needs more than one program")
