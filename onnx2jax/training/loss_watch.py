"""Warns of the first step whose loss is NaN, without waiting for steps that are still running."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from ..errors import NaNLossWarning
from ..ops.arrays import is_traced


class LossWatch:
    """A context that is called with the metrics of each step; of metrics without a loss, all scalars are watched."""

    def __init__(self) -> None:
        self._steps = 0
        self._running = deque[tuple[int, dict[str, Any]]]()
        self._warned = False

    def __call__(self, metrics: Mapping[str, Any]) -> None:
        """Watch the metrics of the next step; warns of those that have been computed."""
        self._steps += 1
        losses = {"loss": metrics["loss"]} if "loss" in metrics else {n: v for n, v in metrics.items() if v.size == 1}
        if not self._warned and not is_traced(losses):
            self._running.append((self._steps, losses))
            self._warn(wait=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._warn(wait=error in (None, GeneratorExit))  # which ends a loop that is left

    def _warn(self, wait: bool) -> None:
        while self._running and (wait or all(v.is_ready() for v in self._running[0][1].values())):
            step, losses = self._running.popleft()
            if names := [n for n, v in losses.items() if np.isnan(np.asarray(v)).any()]:
                self._warned = True
                self._running.clear()
                warnings.warn(
                    f"{names[0]} is NaN in step {step}: its batch has NaN, or earlier steps diverged. Leave out such "
                    "samples, np.isnan(batch[name]), or lower the learning rate; parameters may be NaN from here on",
                    NaNLossWarning,
                    stacklevel=4,
                )
