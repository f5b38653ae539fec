"""``onnx2jax bench`` and ``profile``: the latency of a call beside onnxruntime's, and its time by node and operator."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from .. import compat
from ..model.reports.comparison import compared
from ..model.reports.page import by_position
from ..model.reports.profile import HEAD, SHOWN, duration
from ..model.reports.verify import in_types_of_file
from ..progress import stage
from .inputs import add_inputs, filled, input_values, sized
from .parser import Arguments, CommandError, Parser, converted, whole
from .terminal import Table, note, print_result, timed

BLOCK: Final = 0.1
"""Minimum seconds of a timed block of calls."""
WARM: Final = 0.06
"""Seconds of warm-up before a block: onnxruntime's threads spin for 40 ms after its last call, and XLA's first calls
after a pause are slow."""
OURS, THEIRS = "onnx2jax", "onnxruntime"


def add_bench(parser: Parser) -> None:
    """Add the options of the command."""
    parser.describe(
        "bench model.onnx --dim batch=8",
        statuses={1: "outputs differ, so nothing is timed; or the model or the data is invalid"},
    )
    add_inputs(parser)
    parser.add_dims()
    parser.add_rebatch()
    parser.add_computing()
    parser.add_argument(
        "--rounds", type=whole, default=9, metavar="N", help="blocks per runtime (default: %(default)s)"
    )
    parser.add_switch("--alone", "without onnxruntime")


def do_bench(arguments: Arguments) -> int:
    model, load_time = timed(lambda: converted(arguments))
    values = input_values(model, arguments)
    feeds = filled(model, values, arguments.seed)
    with stage("compiling"), sized(model, values):
        ours, first = timed(lambda: model.run(None, feeds))
    calls: dict[str, Callable[[], Any]] = {OURS: lambda: model.run(None, feeds)}
    declared = in_types_of_file(model, feeds)
    if not arguments.alone and (session := _session(arguments.model, declared)) is not None:
        theirs = dict(zip((v.name for v in session.get_outputs()), session.run(None, declared), strict=True))
        options: dict[str, Any] = {"only_types": model.graph.draws, "dtype": model.settings.dtype}
        comparisons = (compared(v.name, o, theirs[v.name], **options) for v, o in zip(model.outputs, ours, strict=True))
        if differing := [c for c in comparisons if not c.ok]:
            # An output may differ although every node is right, as verify judges.
            verification = model.verify(dict(feeds), against=THEIRS)
            judged = chain(*verification.outputs.values()) if verification else ()
            reasons = {c.value: c.why for c in judged if c.ok and c.why}
            first_wrong = next((c for c in differing if c.value not in reasons), None)
            shown = first_wrong or differing[0]
            text = f"output {shown.value!r} differs from onnxruntime's: {reasons.get(shown.value, shown.why)}"
            if first_wrong:
                note(f"{text}; see onnx2jax verify, or time the model with --alone")
                return 1
            note(text)
        calls[THEIRS] = lambda: session.run(None, declared)
    with stage("timing"):
        times = measured(calls, max(1, arguments.rounds))
    _print(arguments, times, load_time, first)
    return 0


def measured(
    calls: Mapping[str, Callable[[], Any]], rounds: int, block: float = BLOCK, warm: float = WARM
) -> dict[str, list[float]]:
    """Seconds per call for each round, by name: warmed blocks alternate, and the order rotates between rounds."""
    names, times = [*calls], dict[str, list[float]]((name, []) for name in calls)
    for call in calls.values():
        call()
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            times[name].append(_block(calls[name], block, warm))
    return times


def _block(call: Callable[[], Any], block: float, warm: float) -> float:
    """Seconds per call over one block, timed as a whole."""
    quick, begun = timed(call)[1], time.perf_counter()
    while time.perf_counter() - begun < warm:
        quick = min(quick, timed(call)[1])
    count = max(1, math.ceil(block / max(quick, 1e-7)))
    begun = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begun) / count


def _session(path: Path, feeds: Mapping[str, Any]) -> Any:
    """An onnxruntime session with its defaults on a CPU; None, with a note, if it cannot run the file."""
    try:
        ort = compat.optional("onnxruntime", "verify")
        options = ort.SessionOptions()
        options.log_severity_level = 4
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        session.run(None, dict(feeds))
        return session
    except ImportError as error:
        note(f"timed alone: {error}")
    except Exception as error:  # onnxruntime's exceptions have no common base class
        note(f"timed alone: onnxruntime does not run the model: {str(error).strip()}")
    return None


def _print(arguments: Arguments, times: Mapping[str, Sequence[float]], load_time: float, first: float) -> None:
    quarters = {n: [float(q) for q in np.quantile(t, (0.25, 0.5, 0.75))] for n, t in times.items()}
    device = jax.devices()[0].device_kind
    seconds = {
        n: {"median": m, "quartiles": [low, high], "rounds": list(times[n])} for n, (low, m, high) in quarters.items()
    }
    rows = [
        (name, duration(middle), f"{duration(low)} to {duration(high)}", f"{1 / middle:,.4g}")
        for name, (low, middle, high) in quarters.items()
    ]
    parts = [
        f"loaded in {duration(load_time)}, first call with its compilation in {duration(first)}, on {device}",
        Table("a call, from NumPy to NumPy", ("", "median", "half of the rounds", "calls/s"), rows),
    ]
    if THEIRS in quarters:
        ratio = quarters[THEIRS][1] / quarters[OURS][1]
        parts.append(f"onnxruntime's median is {ratio:.3g} times that of onnx2jax")
    facts = {"device": device, "load": load_time, "first_call": first, "seconds": seconds}
    print_result(arguments, facts, *parts)


def add_profile(parser: Parser) -> None:
    """Add the options of the command."""
    parser.describe("profile model.onnx --dim batch=8")
    add_inputs(parser)
    parser.add_dims()
    parser.add_rebatch()
    parser.add_dtype()
    parser.add_argument("--calls", type=whole, default=20, metavar="N", help="calls to record (default: %(default)s)")
    parser.add_switch("--all", f"list every node, not the first {SHOWN}")


def do_profile(arguments: Arguments) -> None:
    if arguments.calls < 1:
        raise CommandError("--calls must be at least 1")
    model = converted(arguments)
    values = input_values(model, arguments)
    args, named = by_position(model, filled(model, values, arguments.seed))
    with stage("compiling and recording"), sized(model, values):
        profile = model.profile(*args, calls=arguments.calls, **named)
    rows = list(profile.rows())
    shown = rows if arguments.all else rows[:SHOWN]
    title = f"{len(rows)} nodes" + (f"; the first {SHOWN}" if len(shown) < len(rows) else "")
    in_nodes = sum(profile.operators.values())
    operators = [(n, duration(s), f"{s / in_nodes:.1%}") for n, s in profile.operators.items()]
    by_operator = Table("operators", ("operator", "per call", "share"), operators)
    print_result(arguments, profile, Table(title, HEAD, shown), by_operator, profile.total)
