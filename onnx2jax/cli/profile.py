"""``onnx2jax profile model.onnx``: where the time of a call goes, by node and by operator."""

from __future__ import annotations

import argparse
from typing import Any

from ..model.reports.profile import HEAD, SHOWN, duration
from .inputs import add_inputs, filled, given, sized
from .terminal import (
    CommandError,
    add_command,
    add_dims,
    add_dtype,
    add_model,
    converted,
    dims,
    print_table,
    whole,
    working,
)


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    profile = add_command(
        commands,
        "profile",
        _profile,
        "show where the time of a call goes, by node and by operator",
        example="profile model.onnx --dim batch=8",
    )
    add_model(profile)
    add_inputs(profile)
    add_dims(profile)
    add_dtype(profile)
    profile.add_argument("--calls", type=whole, default=20, metavar="N", help="calls to record (default: %(default)s)")
    profile.add_argument("--all", action="store_true", help=f"list every node, not the first {SHOWN}")


def _profile(arguments: argparse.Namespace) -> int:
    if arguments.calls < 1:
        raise CommandError("--calls must be at least 1")
    model = converted(arguments, dims=dims(arguments.dim))
    feeds = filled(model, given(model, arguments), arguments.seed)
    by_place = [feeds[v.name] for v in model.inputs]  # by position: a name may be that of an argument
    rest = {n: v for n, v in feeds.items() if n not in {v.name for v in model.inputs}}
    with working("compiling and recording"), sized(model, feeds):
        found = model.profile(*by_place, calls=arguments.calls, **rest)
    if arguments.json:
        print(found.to_json())
        return 0
    rows = list(found.rows())
    shown = rows if arguments.all else rows[:SHOWN]
    print_table(f"{len(rows)} nodes" + (f"; the first {SHOWN}" if len(shown) < len(rows) else ""), HEAD, shown)
    every = sum(found.operators.values())
    kinds = [(n, duration(s), f"{s / every:.1%}") for n, s in found.operators.items()]
    print_table("operators", ("operator", "per call", "share"), kinds)
    print(found.total)
    return 0
