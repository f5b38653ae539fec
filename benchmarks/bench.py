"""Measure everything and write docs/performance.md: ``python -m benchmarks.bench [model folders] [--only names]``.

Rows are ``group/name``: real models, synthetic networks, single operators, calls, start-up and memory. Without
``--only`` all of them, which takes about an hour on two cores; with it, rows whose key contains one of the names, the
others keep their figures in the JSON file. ``--quick`` measures roughly and writes only with ``--json``.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax

from . import harness, models, networks, report, rivals, thunks
from .groups import GROUPS, Settings
from .machine import machine
from .rivals import OURS

FILE = Path(__file__).resolve().parent.parent / "docs" / "performance.json"
NEWEST = FILE.with_name("performance_newest.json")
"""Models and networks with the newest release of JAX, for the first column of the same page's summary.

Other files whose names begin with ``performance_`` have further columns: those of other processors, measured with
``--only models/ --only networks/`` and copied there.
"""


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.bench", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("paths", nargs="*", type=Path, help="real models: files, and folders with model.onnx in them")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="rows whose group/name contains it")
    parser.add_argument("--quick", action="store_true", help="three rounds, one process: a rough look")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="where figures are kept; the page is written beside it"
    )
    parser.add_argument(
        "--newest", action="store_true", help="models and networks in fewer rounds, for the page's first column"
    )
    parser.add_argument("--cores", type=lambda text: [int(c) for c in text.split(",")], default=[], metavar="0,1")
    parser.add_argument("--no-torch", action="store_true", help="leave PyTorch out")
    parser.add_argument("--list", action="store_true", help="name the rows and measure nothing")
    parser.add_argument("--thunks", metavar="NAME", help="where XLA spends its time: a network, or a model's path")
    parser.add_argument("--batch", type=int, default=1, help="of the network that --thunks looks at")
    return parser.parse_args(given)


def measure(options: argparse.Namespace, groups: dict[str, Any]) -> bool:
    """Measure the selected rows, printing each; returns whether all of them could be measured."""
    rounds, repeats = (3, 1) if options.quick or options.newest else (harness.ROUNDS, 3)
    settings = Settings(tuple(options.paths), rounds, repeats, not options.no_torch)
    whole = True
    for group, rows in GROUPS.items():
        for name, measured in rows(settings):
            key = f"{group}/{name}"
            if options.only and not any(o in key for o in options.only):
                continue
            if options.list:
                print(key)
                continue
            row = guarded(measured)
            whole &= "error" not in row
            groups.setdefault(group, {})[name] = row
            print(f"{key:52} {described(row)}", flush=True)
            jax.clear_caches()
            gc.collect()
    return whole


def guarded(measured: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The row, or its error, without local folders: one failing model does not stop the others."""
    try:
        return measured()
    except Exception as e:
        text = re.sub(r"(?<!\S)/\S*/", "", (str(e).splitlines() or [""])[0])
        return {"error": f"{type(e).__name__}: {text[:200]}"}


def described(row: dict[str, Any]) -> str:
    """A row in one line of text."""
    if "error" in row:
        return row["error"]
    if "ready" in row:
        times = (f"{n} {t['convert wall'] + t['call wall']:.2f} s" for n, t in row["ready"].items())
        needed = row["memory"]["weights and activations"]
        return "  ".join([*times, f"memory x {row['memory'][OURS] / needed:.1f}"])
    if "sizes" in row:
        return "  ".join(f"{n} {t['convert wall'] + t['call wall']:.2f} s" for n, t in row["sizes"].items())
    if "processes" in row:
        return "  ".join(f"{kind} {seconds:.2f} s" for kind, seconds in row["processes"].items())
    ours = row["seconds"][OURS]["median"]
    against = (f"{rival} {r['paired'][1]:.2f}" for rival, r in row["ratios"].items())
    return f"{ours * 1e3:10.3f} ms  " + "  ".join(against)


def explain(name: str, batch: int) -> None:
    """Print where XLA spends its time for a network or a model."""
    with TemporaryDirectory() as folder:
        dump = Path(folder) / "dump"
        thunks.dumping(dump)
        found: dict[str, harness.Call] = {}
        if name in networks.NETWORKS:
            network = networks.NETWORKS[name](Path(folder), batch)
            found = rivals.rivals(network, (OURS, rivals.BY_HAND))
        else:
            import onnx2jax

            (path,) = (path for _, path in models.found([Path(name)]))
            model = onnx2jax.convert(path)
            found = {OURS: partial(model.run, None, models.inputs(path, model))}
        for rival, call in found.items():
            call()
            spent = thunks.traced(call)
            print(f"{rival}\n{thunks.table(spent, thunks.origins(dump))}\n")


def main(given: list[str] | None = None) -> int:
    """The exit code: 0 if all rows could be measured."""
    options = arguments(given)
    kept = NEWEST if options.newest else FILE
    file: Path | None = options.json or (None if options.quick or options.list else kept)
    if options.newest and not options.only:
        options.only = ["models/", "networks/"]
    with harness.pinned(options.cores):
        if options.thunks:
            explain(options.thunks, options.batch)
            return 0
        old = json.loads(file.read_text())["groups"] if file and options.only and file.exists() else {}
        whole = measure(options, old)
        figures = {"machine": machine(), "groups": {g: old[g] for g in GROUPS if g in old}}
    if file:
        file.write_text(json.dumps(figures, indent=1) + "\n")
        write_page(FILE if file == NEWEST else file)
    return 0 if whole else 1


def write_page(file: Path) -> None:
    """The page and its plot beside a file of figures, with those of other releases and processors beside it."""
    newest = file.with_name(NEWEST.name)
    rest = sorted({*file.parent.glob(f"{file.stem}_*.json")} - {newest})
    columns = [json.loads(each.read_text()) for each in (newest, file, *rest) if each.exists()]
    figures, drawn = json.loads(file.read_text()), file.with_suffix(".svg")
    drawing = report.plot(figures, drawn)
    file.with_suffix(".md").write_text(report.page(figures, drawn.name if drawing else None, columns))


if __name__ == "__main__":
    sys.exit(main())
