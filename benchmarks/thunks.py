"""XLA's time by operation of the compiled program, from a trace by ``jax.profiler``.

The table has the ONNX node of each operation's result, from XLA's text of the program;
an operation that contains others (a loop) includes their time.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import jax

from .harness import Call

CALLS = 20


def dumping(folder: Path) -> None:
    """Make XLA dump its programs as text; call it before anything is compiled."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_dump_to={folder} --xla_dump_hlo_as_text".strip()


def traced(call: Call, calls: int = CALLS) -> Counter[str]:
    """Seconds per call in each operation, by ``program/operation``, of a warmed-up call."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                call()
        (path,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    spent: Counter[str] = Counter()
    for event in events:
        if event.get("ph") == "X" and "hlo_op" in event.get("args", {}):
            spent[f"{event['args']['hlo_module']}/{event['args']['hlo_op']}"] += event["dur"] * 1e-6 / calls
    return spent


def origins(folder: Path) -> dict[str, str]:
    """The source of each operation in the traced function, from the dump of ``dumping``."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*after_optimizations.txt")):
        module = path.name.split(".")[1]
        for line in path.read_text(errors="replace").splitlines():
            named = re.match(r'\s*(?:ROOT )?%?([\w.\-]+) = .*metadata=\{.*?op_name="([^"]*)"', line)
            if named:
                found[f"{module}/{named[1]}"] = named[2]
    return found


def table(spent: Mapping[str, float], origins: Mapping[str, str], most: int = 25) -> str:
    """A table of the operations that take longest, with their share."""
    total = sum(spent.values()) or 1.0
    rows = sorted(spent.items(), key=lambda item: -item[1])
    lines = [f"{'ms a call':>10} {'share':>6}  operation, and where it comes from"]
    lines += [f"{t * 1e3:10.3f} {t / total:6.1%}  {n:48} {origins.get(n, '')}" for n, t in rows[:most]]
    rest = sum(t for _, t in rows[most:])
    if rest:
        lines.append(f"{rest * 1e3:10.3f} {rest / total:6.1%}  {len(rows) - most} others")
    return "\n".join([*lines, f"{total * 1e3:10.3f}         all, summed over threads"])
