"""A progress bar with the latest metrics, drawn by rich."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import jax
import numpy as np

from .. import compat
from ..progress import hidden

INTERVAL: Final = 0.1
"""Seconds between updates: reading metrics waits for the computation."""


@contextmanager
def bar(wanted: bool | None, total: int | None) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A context whose function is called with the metrics of each step.

    Args:
        wanted: whether to draw; None draws if rich is installed and stderr is a terminal. Only the first process draws.
        total: the number of steps, if known.

    Raises:
        ImportError: ``wanted`` is True, but rich is not installed.
    """
    draws = (sys.stderr.isatty() if wanted is None else wanted) and not jax.process_index()
    if draws:
        try:
            console, progress = (compat.optional(f"rich.{part}", "train") for part in ("console", "progress"))
        except ImportError:
            if wanted:
                raise
            draws = False
    if not draws:
        yield lambda _: None
        return
    columns = (
        progress.TextColumn("step {task.completed}" + ("" if total is None else f"/{total}")),
        progress.BarColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.fields[metrics]}"),
    )
    with hidden(), progress.Progress(*columns, console=console.Console(stderr=True)) as drawn:
        task = drawn.add_task("", total=total, metrics="compiling")
        latest: Mapping[str, Any] = {}
        updated = 0.0

        def show(metrics: Mapping[str, Any]) -> None:
            nonlocal latest, updated
            latest = metrics
            drawn.advance(task)
            if time.monotonic() - updated > INTERVAL:
                drawn.update(task, metrics=_text(latest))
                updated = time.monotonic()

        yield show
        drawn.update(task, metrics=_text(latest))


def _text(metrics: Mapping[str, Any]) -> str:
    scalars = {n: np.asarray(v) for n, v in metrics.items() if np.ndim(v) == 0}
    return "  ".join(f"{n} {float(v):.4g}" for n, v in scalars.items())
