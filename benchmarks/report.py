"""Writes docs/performance.md and its plot from docs/performance.json."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from .machine import sentence
from .notes import CLASSES, EXPLANATIONS, MEMORY, READY, STEPS, Explanation, class_of, explanations
from .rivals import ORT, OURS

Row = Mapping[str, Any]
Rows = Mapping[str, Row]

TITLES: Final = {
    "models": "Real models",
    "networks": "Synthetic networks",
    "operators": "Single operators",
    "calls": "Calls with almost nothing to compute",
    "ready": "Until a model is ready",
    "processes": "Whole processes",
    "sizes": "Large files",
}
HEAD: Final = """# Performance

How fast models run here, beside onnxruntime and the same networks by hand in JAX. A ratio is a rival's time over ours:
**above 1, onnx2jax is faster**. All rivals run in one process and in turns, from NumPy to NumPy; a ratio is the median
of the ratios within each round. Rivals must agree on the numbers before they are timed; in quantised files, where
roundings add up, each node must agree on the same operands. Hand-written JAX is the limit of a compiler to XLA.

`make bench` writes this page. TPUs and GPUs: [Accelerators](accelerators.md)."""
SUMMARY: Final = """## Summary

Time of onnxruntime over ours, by class of model, on a CPU. The second column is the choice for inference alone:
onnx2jax adds gradients, vmap, sharding, TPUs and GPUs for all of them."""
COLUMNS: Final = (
    "The columns of medians are of, in their order (the newest release by `make bench-newest`, in fewer rounds):"
)
FAST: Final = 0.95
"""Median ratio from which onnx2jax is no slower in practice."""
CLOSE: Final = 0.7
"""Median ratio below which onnxruntime is the better choice on a CPU."""


def page(figures: Mapping[str, Any], plot: str | None = None, columns: Sequence[Mapping[str, Any]] = ()) -> str:
    """The page.

    Args:
        figures: all of them.
        plot: the plot's name.
        columns: for the summary, these and those of models and networks with other releases of JAX and processors.
    """
    columns = columns or [figures]
    groups: Mapping[str, Rows] = figures["groups"]
    loads = [row["load"][0] for rows in groups.values() for row in rows.values() if "load" in row]
    load = f" Load average while measuring: {min(loads):.1f} to {max(loads):.1f}." if loads else ""
    parts = [HEAD, f"Measured on {sentence(figures['machine'])}{load}", SUMMARY, _summary(columns)]
    if len(columns) > 1:
        parts += [COLUMNS, "\n".join(f"{i}. {sentence(each['machine'])}" for i, each in enumerate(columns, 1))]
    if plot:
        parts.append(f"![Models by their time relative to onnxruntime's]({plot})")
    used: set[Explanation] = set()
    for group, rows in groups.items():
        if group == "sizes":
            parts += _sizes(rows)
        elif group == "processes":
            parts += _processes(rows)
        elif group != "ready":
            parts += [f"## {TITLES.get(group, group)}", _folded(f"{len(_timed(rows))} rows", _table(group, rows, used))]
            parts += _failed(rows)
        else:
            parts += _ready(rows)
    parts += ["## Where the time goes", "Rows that are slower than a rival link to these paragraphs."]
    parts += [part for each in EXPLANATIONS if each in used for part in _explained(each, "###")]
    parts += _explained(STEPS, "##")
    return "\n\n".join(parts) + "\n"


def ms(seconds: float) -> str:
    """A time in milliseconds, with three significant digits."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def anchor(title: str) -> str:
    """The anchor of a heading, as MkDocs and GitHub make it."""
    return re.sub(r"[^\w-]", "", title.lower().replace(" ", "-"))


def by_class(groups: Mapping[str, Rows]) -> dict[str, list[tuple[float, str]]]:
    """For each class of models the ratios to onnxruntime with the rows' names, ascending."""
    found: dict[str, list[tuple[float, str]]] = {name: [] for name in CLASSES}
    for group in ("models", "networks"):
        for name, row in _timed(groups.get(group, {})).items():
            kind = class_of(f"{group}/{name}")
            if kind is not None and ORT in row["ratios"]:
                found[kind].append((row["ratios"][ORT]["paired"][1], name))
    return {name: sorted(rows) for name, rows in found.items() if rows}


def _summary(columns: Sequence[Mapping[str, Any]]) -> str:
    """A row for each class; the choice follows from the first column of medians. Then the geometric means of all."""
    found = [by_class(each["groups"]) for each in columns]
    lines = []
    for kind in dict.fromkeys(kind for classes in found for kind in classes):
        rows = next(classes[kind] for classes in found if kind in classes)
        quantiles = [np.quantile([r for r, _ in each.get(kind, [])] or [np.nan], (0.25, 0.5, 0.75)) for each in found]
        middle = np.median([ratio for ratio, _ in rows])
        choice = "onnx2jax" if middle >= FAST else "either" if middle >= CLOSE else "onnxruntime"
        medians = ("-" if m != m else f"**{m:.2f}** ({low:.2f} to {high:.2f})" for low, m, high in quantiles)
        cells = [kind, choice, str(len(rows)), *medians]
        lines.append([*cells, *(f"{name} {ratio:.2f}" for ratio, name in (rows[0], rows[-1]))])
    every = [[ratio for rows in classes.values() for ratio, _ in rows] for classes in found]
    if all(every):
        means = (f"**{np.exp(np.log(ratios).mean()):.2f}** of {len(ratios)}" for ratios in every)
        lines.append(["all: geometric mean", "", "", *means, "", ""])
    names = [f"{_processor(each, columns)}jax {_release(each)}: median (quartiles)" for each in columns]
    return _lines(["class", "on a CPU pick", "rows", *names, "slowest", "fastest"], lines)


def _processor(figures: Mapping[str, Any], columns: Sequence[Mapping[str, Any]]) -> str:
    """The instruction sets that not all of the processors have, for the head of a column."""
    common = set[str].intersection(*({*each["machine"]["instructions"]} for each in columns))
    further = [name for name in figures["machine"]["instructions"] if name not in common]
    return f"with {', '.join(further)}, " if further else ""


def _release(figures: Mapping[str, Any]) -> str:
    return ".".join(figures["machine"]["versions"]["jax"].split(".")[:2])


def _lines(head: list[str], rows: Iterable[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def _folded(title: str, text: str) -> str:
    return f'<details markdown="1"><summary>{title}</summary>\n\n{text}\n\n</details>'


def _timed(rows: Rows) -> dict[str, Row]:
    return {name: row for name, row in rows.items() if "seconds" in row}


def _table(group: str, rows: Rows, used: set[Explanation]) -> str:
    """Rows sorted by their ratio to onnxruntime, slowest first; adds the explanations they link to ``used``."""
    timed = _timed(rows)
    rivals = list(dict.fromkeys(r for row in timed.values() for r in row["seconds"] if r != OURS))
    lines = []
    for name, row in sorted(timed.items(), key=lambda item: _ratio(item[1], rivals)):
        low, high = row["seconds"][OURS]["quartiles"]
        cells = [name, f"{ms(row['seconds'][OURS]['median'])} ({ms(low)} to {ms(high)})"]
        for rival in rivals:
            seconds = row["seconds"].get(rival)
            cells.append(f"{ms(seconds['median'])} / **{row['ratios'][rival]['paired'][1]:.2f}**" if seconds else "")
        slower = any(v["paired"][1] < 1 for v in row["ratios"].values())
        found = explanations(f"{group}/{name}") if slower else ()
        used.update(found)
        lines.append([*cells, ", ".join(f"[{each.title}](#{anchor(each.title)})" for each in found)])
    return _lines(["", f"{OURS}, ms (quartiles)", *(f"{r}, ms / ratio" for r in rivals), "where the time goes"], lines)


def _ratio(row: Row, rivals: list[str]) -> float:
    ratios = row["ratios"]
    return float(next(ratios[r]["paired"][1] for r in (ORT, *rivals) if r in ratios))


def _explained(each: Explanation, level: str) -> Iterator[str]:
    yield f"{level} {each.title}"
    yield each.text
    if each.tried:
        yield _folded("What was tried", "\n".join(f"- {tried}" for tried in each.tried))


def _until_ready(taken: Mapping[str, float]) -> str:
    """Seconds, and in brackets seconds of processor time by step."""
    compiling = [taken["compile work"]] if "compile work" in taken else []
    steps = [taken["convert work"], taken["call work"] - sum(compiling), *compiling]
    return f"{taken['convert wall'] + taken['call wall']:.2f} ({' + '.join(f'{s:.2f}' for s in steps)})"


def _ready(rows: Rows) -> Iterator[str]:
    """Two tables: seconds and bytes."""
    timed = {name: row for name, row in rows.items() if "ready" in row}
    kinds = list(dict.fromkeys(k for row in timed.values() for k in row["ready"]))
    heading, text, *tried = _explained(READY, "##")
    yield heading
    yield (
        "Seconds from the file to the first result in a fresh process, without imports. In brackets, seconds of "
        "processor time: converting, tracing with the call itself, compiling; for onnxruntime, the session and its "
        "first run."
    )
    lines = []
    for name, row in timed.items():
        cells = [name]
        cells += [_until_ready(row["ready"][kind]) for kind in kinds]
        lines.append(cells)
    yield _lines(["", *kinds], lines)
    yield from (text, *tried)
    heading, text, *tried = _explained(MEMORY, "##")
    yield heading
    yield (
        "MB by which a process grows at most from before `convert` to after the first call, and the ratio to the "
        "weights and the activations that are live at once when nodes run one by one."
    )
    lines = []
    for name, row in timed.items():
        memory = row["memory"]
        needed = memory["weights and activations"]
        others = (k for k in memory if k not in ("weights", "weights and activations"))
        used = [f"{memory[k] / 1e6:.0f} / **{memory[k] / needed:.1f}**" for k in others]
        lines.append([name, f"{memory['weights'] / 1e6:.0f}", f"{needed / 1e6:.0f}", *used])
    yield _lines(["", "weights", "weights and activations", OURS, "onnxruntime"], lines)
    yield from (text, *tried)


def _sizes(rows: Rows) -> Iterator[str]:
    """Seconds and memory by the size of the file."""
    yield f"## {TITLES['sizes']}"
    yield (
        "Seconds from the file to the first result in a fresh process, with the processor time of its steps as above, "
        "and the GB by which the process grows at most."
    )
    lines = []
    for name, row in rows.items():
        if "sizes" not in row:
            continue
        cells = [name]
        for each in row["sizes"].values():
            cells += [_until_ready(each), f"{(each['peak'] - each['before']) / 1e9:.2f}"]
        lines.append(cells)
    yield _lines(["", OURS, "GB", "onnxruntime", "GB"], lines)
    yield from _failed(rows)


def _processes(rows: Rows) -> Iterator[str]:
    """Seconds of whole processes."""
    yield f"## {TITLES['processes']}"
    yield (
        "Seconds from the start of Python to the first result, with imports and default settings: a process that finds "
        "nothing in the cache of compiled programs, one after it, and onnxruntime's. In brackets onnxruntime's time "
        "over ours."
    )
    lines = []
    for name, row in rows.items():
        if "processes" in row:
            first, later, theirs = (row["processes"][kind] for kind in ("first", "later", ORT))
            ours = [f"{each:.2f} (**{theirs / each:.2f}**)" for each in (first, later)]
            lines.append([name, *ours, f"{theirs:.2f}"])
    yield _lines(["", "onnx2jax, first process", "later processes", ORT], lines)
    yield from _failed(rows)


def _failed(rows: Rows) -> Iterator[str]:
    failed = [f"- **{name}**: {row['error']}" for name, row in rows.items() if "error" in row]
    if failed:
        yield _folded(f"{len(failed)} not measured", "\n".join(failed))


def plot(figures: Mapping[str, Any], path: Path) -> bool:
    """Plot the ratios to onnxruntime by class, as sorted bars with labels on a logarithmic axis, as SVG.

    False without matplotlib or without rows.
    """
    found = by_class(figures["groups"])
    if not found or importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "performance", "svg.fonttype": "none"}
    from matplotlib import pyplot

    heights = [len(rows) + 1.5 for rows in found.values()]
    figure, axes = pyplot.subplots(
        len(found), 1, figsize=(5, 0.17 * sum(heights) + 1), squeeze=False, height_ratios=heights, layout="constrained"
    )
    ratios = [ratio for rows in found.values() for ratio, _ in rows]
    for (kind, rows), axis in zip(found.items(), axes[:, 0], strict=True):
        values = [ratio for ratio, _ in rows]
        bars = axis.barh(range(len(rows)), [v - 1 for v in values], left=1, height=0.7)
        for bar, value in zip(bars, values, strict=True):
            bar.set_color("C0" if value >= 1 else "C1")
            side = {"ha": "left", "x": value * 1.04} if value >= 1 else {"ha": "right", "x": value / 1.04}
            axis.text(y=bar.get_y() + bar.get_height() / 2, s=f"{value:.2f}", va="center", fontsize=6, **side)
        axis.axvline(1, color="0.5", lw=0.8)
        axis.set_xscale("log")
        axis.set_xlim(min(ratios) / 1.6, max(ratios) * 1.6)
        axis.set_yticks(range(len(rows)), [name for _, name in rows], fontsize=6)
        axis.xaxis.set_visible(False)
        axis.set_title(kind, fontsize=8, loc="left")
    figure.supxlabel("time of onnxruntime / time of onnx2jax (to the right, onnx2jax is faster)", fontsize=7)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True
