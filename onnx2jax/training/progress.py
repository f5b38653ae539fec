"""A progress bar with the newest metrics, drawn by rich."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import jax
import numpy as np

from .. import compat

INTERVAL: Final = 0.1
"""Seconds between two looks at the metrics: each waits for the computation."""


@contextmanager
def bar(wanted: bool | None, total: int | None) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A function to be called with the metrics of each step.

    Args:
        wanted: None draws where rich is installed and the error stream is a terminal. Of several processes the first
            draws.
        total: steps in all, when known.

    Raises:
        ImportError: a bar is wanted, but there is no rich.
    """
    if wanted is False or (wanted is None and not sys.stderr.isatty()) or jax.process_index():
        yield _silent
        return
    try:
        console, progress = (compat.optional(f"rich.{part}", "train") for part in ("console", "progress"))
    except ImportError:
        if wanted:
            raise
        yield _silent
        return
    columns = (
        progress.TextColumn("step {task.completed}" + ("" if total is None else f"/{total}")),
        progress.BarColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.fields[metrics]}"),
    )
    with progress.Progress(*columns, console=console.Console(stderr=True)) as drawn:
        task = drawn.add_task("", total=total, metrics="")
        newest: Mapping[str, Any] = {}
        looked = 0.0

        def show(metrics: Mapping[str, Any]) -> None:
            nonlocal newest, looked
            newest = metrics
            drawn.advance(task)
            if time.monotonic() - looked > INTERVAL:
                drawn.update(task, metrics=_text(newest))
                looked = time.monotonic()

        yield show
        drawn.update(task, metrics=_text(newest))


def _silent(_: Mapping[str, Any]) -> None:
    pass


def _text(metrics: Mapping[str, Any]) -> str:
    scalars = {n: np.asarray(v) for n, v in metrics.items() if np.ndim(v) == 0}
    return "  ".join(f"{n} {float(v):.4g}" for n, v in scalars.items())
