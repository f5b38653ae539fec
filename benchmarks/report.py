"""Writes docs/performance.md and its plot from docs/performance.json."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .machine import sentence
from .notes import MEMORY, READY, STEPS, note
from .rivals import OURS

Row = Mapping[str, Any]

TITLES = {
    "models": "Real models",
    "networks": "Synthetic networks",
    "operators": "Single operators",
    "calls": "Calls with almost nothing to compute",
    "ready": "Until a model is ready",
    "memory": "Memory until then",
}
HEAD = """# Performance

Written by `make bench`. Times are medians of a call from NumPy to NumPy, all rivals in one process and in turns, as
`benchmarks/harness.py` says; with each rival's stands how many times as fast this compiler is: the median of the ratios
within each round. Above 1 it is faster. Before a row is timed, all rivals have given the same numbers; where roundings
to 8 bits add up over hundreds of nodes, as in yolox_nano_int8_qdq, every node has, on the same operands. Hand-written
JAX is the limit of a compiler to XLA; `benchmarks/networks/` holds it."""


def page(figures: Mapping[str, Any], plot: str | None = None) -> str:
    """The page."""
    loads = [row["load"][0] for rows in figures["groups"].values() for row in rows.values() if "load" in row]
    load = f" Load average while measuring: {min(loads):.1f} to {max(loads):.1f}." if loads else ""
    parts = [HEAD, f"Measured on {sentence(figures['machine'])}{load}"]
    if plot:
        parts.append(f"![How many times as fast as each rival]({plot})")
    for group, rows in figures["groups"].items():
        parts += [*_ready(rows)] if group == "ready" else [f"## {TITLES.get(group, group)}", _table(rows)]
        parts += [*_below(group, rows), *_failed(rows)]
    parts += ["## Steps of training", STEPS]
    return "\n\n".join(parts) + "\n"


def ms(seconds: float) -> str:
    """A time in milliseconds, with three significant digits."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _lines(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def _table(rows: Mapping[str, Row]) -> str:
    timed = {name: row for name, row in rows.items() if "seconds" in row}
    rivals = list(dict.fromkeys(r for row in timed.values() for r in row["seconds"] if r != OURS))
    lines = []
    for name, row in timed.items():
        low, high = row["seconds"][OURS]["quartiles"]
        cells = [name, f"{ms(row['seconds'][OURS]['median'])} ({ms(low)} to {ms(high)})"]
        for rival in rivals:
            seconds = row["seconds"].get(rival)
            cells.append(f"{ms(seconds['median'])} / **{row['ratios'][rival]['paired'][1]:.2f}**" if seconds else "")
        lines.append(cells)
    return _lines(["", f"{OURS}, ms (quartiles)", *(f"{r}, ms / ratio" for r in rivals)], lines)


def _ready(rows: Mapping[str, Row]) -> Iterator[str]:
    """Two tables: seconds and bytes."""
    timed = {name: row for name, row in rows.items() if "ready" in row}
    kinds = list(dict.fromkeys(k for row in timed.values() for k in row["ready"]))
    yield f"## {TITLES['ready']}"
    yield (
        "Seconds in a fresh process from the file to the first result, imports done; in brackets, of processor time: "
        "converting, tracing with the call itself, compiling; for onnxruntime the session and its first run."
    )
    lines = []
    for name, row in timed.items():
        cells = [name]
        for kind in kinds:
            t = row["ready"][kind]
            parts = [t["convert work"], t["call work"] - t.get("compile work", 0.0)]
            parts += [t["compile work"]] if "compile work" in t else []
            cells.append(f"{t['convert wall'] + t['call wall']:.2f} ({' + '.join(f'{p:.2f}' for p in parts)})")
        lines.append(cells)
    yield _lines(["", *kinds], lines)
    yield READY
    yield f"## {TITLES['memory']}"
    yield (
        "MB that a process grows by at most from before `convert` to after the first call, and how many times that is "
        "the weights and the activations that live at once when nodes run one by one."
    )
    lines = []
    for name, row in timed.items():
        memory = row["memory"]
        needed = memory["weights and activations"]
        others = (k for k in memory if k not in ("weights", "weights and activations"))
        used = [f"{memory[k] / 1e6:.0f} / **{memory[k] / needed:.1f}**" for k in others]
        lines.append([name, f"{memory['weights'] / 1e6:.0f}", f"{needed / 1e6:.0f}", *used])
    yield _lines(["", "weights", "weights and activations", OURS, "onnxruntime"], lines)
    yield MEMORY


def _below(group: str, rows: Mapping[str, Row]) -> Iterator[str]:
    """The rows that are slower than a rival, with their notes."""
    alike: dict[str, list[str]] = {}
    for name, row in rows.items():
        slower = {r: v["paired"][1] for r, v in row.get("ratios", {}).items() if v["paired"][1] < 1}
        if slower and group != "calls":
            against = ", ".join(f"{ratio:.2f} of {rival}" for rival, ratio in slower.items())
            alike.setdefault(note(f"{group}/{name}"), []).append(f"**{name}** ({against})")
    if alike:
        lines = [f"- {'; '.join(names)}: {text}" for text, names in alike.items()]
        yield "Below 1, where the time goes and what was tried:\n\n" + "\n".join(lines)


def _failed(rows: Mapping[str, Row]) -> Iterator[str]:
    failed = [f"- **{name}**: {row['error']}" for name, row in rows.items() if "error" in row]
    if failed:
        yield "Not measured:\n\n" + "\n".join(failed)


def plot(figures: Mapping[str, Any], path: Path) -> bool:
    """Plot the ratios as dots on a logarithmic axis, as SVG; False without matplotlib or without rows."""
    groups = {g: {n: r["ratios"] for n, r in rows.items() if r.get("ratios")} for g, rows in figures["groups"].items()}
    groups = {g: rows for g, rows in groups.items() if rows and g != "calls"}
    if not groups or importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "performance", "svg.fonttype": "none"}
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    heights = [len(rows) + 2 for rows in groups.values()]
    figure, axes = pyplot.subplots(
        len(groups), 1, figsize=(8, 0.2 * sum(heights) + 1), squeeze=False, height_ratios=heights, layout="constrained"
    )
    rivals = list(dict.fromkeys(r for rows in groups.values() for ratios in rows.values() for r in ratios))
    for (group, rows), axis in zip(groups.items(), axes[:, 0], strict=True):
        for k, rival in enumerate(rivals):
            points = [(v[rival]["paired"][1], i) for i, v in enumerate(rows.values()) if rival in v]
            axis.plot(*zip(*points, strict=True), "o", color=f"C{k}", ms=4) if points else None
        axis.axvline(1, color="0.5", lw=1)
        axis.set_xscale("log")
        axis.set_yticks(range(len(rows)), list(rows), fontsize=7)
        axis.invert_yaxis()
        axis.set_title(TITLES.get(group, group), fontsize=9)
    dots = [Line2D([], [], marker="o", ls="", ms=4, color=f"C{k}") for k in range(len(rivals))]
    figure.legend(
        dots, [f"as {r}" for r in rivals], loc="outside lower center", ncols=4, fontsize=8, title="times as fast"
    )
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True
