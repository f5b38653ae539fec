"""Partitions in a row: traced one after another, and compiled side by side before the first of them runs.

What one partition hands to the next is known by its types once it is traced. XLA compiles without the interpreter lock,
so the next one is traced meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import groupby
from typing import Any

from ..compat import cores
from ..ir.graph import Graph
from .compile import Subprogram
from .cut import body_of
from .dispatch import CallContext


def compile_ahead(
    row: Sequence[Subprogram], values: Mapping[str, Any], fixed: Collection[str], context: CallContext
) -> None:
    """Compile the programs of partitions in a row, as far as their types can be known.

    What tracing raises here, or XLA, the call of the partition raises again.

    Args:
        row: the partitions.
        values: all that they read from before the first.
        fixed: the names of values that are known at compile time.
        context: as for a call of each.
    """
    threads = min(len(row), cores())
    if threads < 2:
        return
    known, stand_ins, fixed = dict(values), set[str](), set(fixed)
    with ThreadPoolExecutor(threads, "onnx2jax-partition") as pool:  # whose threads have ended when it is left
        try:
            with suppress(Exception):
                for subprogram in row:
                    traced = subprogram.compile_ahead(pool, stand_ins, known, fixed, context)
                    if traced is None:
                        break
                    names = [v.name for v in subprogram.graph.outputs]
                    known.update(zip(names, traced.outputs, strict=True))
                    fixed.update(traced.fixed)
                    stand_ins.update({*names}.difference(traced.fixed))
        except BaseException:  # KeyboardInterrupt
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def row_from(parts: Graph, graph: Graph) -> list[Graph]:
    """The partitions that are compiled with nothing on the host between them, if ``graph`` is the first of several."""
    groups = (list(group) for _, group in groupby(map(body_of, parts.nodes), lambda body: body is None))
    rows = ([body for body in group if body is not None] for group in groups)
    return next((row for row in rows if len(row) > 1 and row[0] is graph), [])
