"""Where XLA spends its time: a trace by ``jax.profiler``, as a table by operation of the compiled program.

Beside each operation stands the node of the file that its result comes from, which XLA's own text of the program says;
an operation that holds others (a loop) counts theirs too.
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
    """Have XLA write its programs as text; before anything is compiled."""
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_dump_to={folder} --xla_dump_hlo_as_text".strip()


def traced(call: Call, calls: int = CALLS) -> Counter[str]:
    """Seconds a call in each operation, as ``program/operation``; the call has been made before."""
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
    """For each operation, where in the traced function it comes from, out of what ``dumping`` had written."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*after_optimizations.txt")):
        module = path.name.split(".")[1]
        for line in path.read_text(errors="replace").splitlines():
            named = re.match(r'\s*(?:ROOT )?%?([\w.\-]+) = .*metadata=\{.*?op_name="([^"]*)"', line)
            if named:
                found[f"{module}/{named[1]}"] = named[2]
    return found


def table(spent: Mapping[str, float], origins: Mapping[str, str], most: int = 25) -> str:
    """The operations that take longest, with their share."""
    total = sum(spent.values()) or 1.0
    rows = sorted(spent.items(), key=lambda item: -item[1])
    lines = [f"{'ms a call':>10} {'share':>6}  operation, and where it comes from"]
    lines += [f"{t * 1e3:10.3f} {t / total:6.1%}  {n:48} {origins.get(n, '')}" for n, t in rows[:most]]
    rest = sum(t for _, t in rows[most:])
    if rest:
        lines.append(f"{rest * 1e3:10.3f} {rest / total:6.1%}  {len(rows) - most} others")
    return "\n".join([*lines, f"{total * 1e3:10.3f}         all, summed over threads"])
