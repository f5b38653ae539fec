"""The best classes of an image classifier's outputs, with labels from a file or a model's metadata."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from .terminal import CommandError

BEST: Final = 5
"""Classes that are shown of each sample."""
SAMPLES: Final = 4
"""Samples of a batch whose classes are shown."""
KEYS: Final = ("names", "labels", "classes", "class_names", "id2label")
"""Metadata in which exporters write labels: Ultralytics' names, and others."""


def labels_of(model: Path, metadata: Mapping[str, str], file: Path | None) -> dict[int, str]:
    """The labels by class: of a file, else of a model's metadata, or of config.json beside it; empty if there are none.

    Raises:
        CommandError: the file has none.
    """
    if file is not None:
        text = file.read_text(encoding="utf-8", errors="replace")
        if found := _labels(_parsed(text) if file.suffix == ".json" else text.splitlines()):
            return found
        raise CommandError(f"--labels {file}: expected a label in each line, or JSON: a list, or labels by number")
    for key in KEYS:
        if found := _labels(_parsed(metadata.get(key, ""))):
            return found
    for config in (model.parent / "config.json", model.parent.parent / "config.json"):  # as optimum writes it
        if config.is_file() and isinstance(facts := _parsed(config.read_text(encoding="utf-8")), dict):
            return _labels(facts.get("id2label"))
    return {}


def _parsed(text: str) -> Any:
    """JSON, or a Python literal; None for other texts."""
    for parse in (json.loads, ast.literal_eval):
        try:
            return parse(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
    return None


def _labels(found: Any) -> dict[int, str]:
    """Labels by class, of a list of them, or of labels by number, as text too; empty for anything else.

    >>> _labels({"0": "cat", "1": ["n02", "dog"]})
    {0: 'cat', 1: 'n02 dog'}
    """
    pairs = dict(enumerate(found)) if isinstance(found, list) else found if isinstance(found, dict) else {}
    if not all(str(k).isdecimal() for k in pairs):
        return {}
    return {int(k): " ".join(map(str, v)) if isinstance(v, list) else str(v) for k, v in pairs.items()}


def best(outputs: Mapping[str, Any], labels: Mapping[int, str]) -> dict[str, list[list[dict[str, Any]]]]:
    """The classes with the greatest scores, by output and sample; outputs that are no scores are left out.

    Scores are floats of [batch, classes] or [batch, classes, 1, 1], of as many classes as labels; without labels, of
    one sample in one output: a detector has several.
    """
    scores = {n: v for n, v in outputs.items() if _is_scores(v, len(labels))}
    if not labels and len(scores) > 1:
        return {}
    return {n: [_of_sample(row.ravel(), labels) for row in v.astype(np.float64)[:SAMPLES]] for n, v in scores.items()}


def _is_scores(value: Any, classes: int) -> bool:
    if not isinstance(value, np.ndarray) or value.ndim not in (2, 4) or not jnp.issubdtype(value.dtype, jnp.floating):
        return False
    batch, count, *others = value.shape
    return {*others} <= {1} and batch > 0 and (count == classes if classes else batch == 1 < count)


def _of_sample(scores: np.ndarray, labels: Mapping[int, str]) -> list[dict[str, Any]]:
    """The best classes of a sample; of scores that are no probabilities also their softmax."""
    rows = []
    for i in np.argsort(-np.nan_to_num(scores, nan=-np.inf), kind="stable")[:BEST].tolist():
        label = {"label": labels.get(i, "")} if labels else {}
        rows.append({"class": i, **label, "score": float(scores[i])})
    if np.isfinite(scores).all() and (scores.min() < 0 or scores.max() > 1):
        powers = np.exp(scores - scores.max())
        rows = [row | {"softmax": float(powers[row["class"]] / powers.sum())} for row in rows]
    return rows
