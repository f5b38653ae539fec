"""What the zoo is made of: cases, which make exports, and the records of what became of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.net import Net

Inputs = Mapping[str, np.ndarray]
Gradients = Callable[[Inputs, Sequence[np.ndarray]], dict[str, np.ndarray]]
"""From inputs and a cotangent for each floating output: the gradient by each floating input and parameter, by name."""


@dataclass
class Export:
    """A model file, and what its framework says about it.

    Attributes:
        path: the file.
        inputs: one set of inputs for each size of the dynamic axes.
        expected: the framework's own outputs for each set; None where only onnxruntime can say.
        gradients: the framework's own derivatives; None where it has none.
        params: the framework's parameters by its names, to find them in the file, whose exporter may rename them.
    """

    path: Path
    inputs: Sequence[Inputs]
    expected: Sequence[Sequence[Any]] | None = None
    gradients: Gradients | None = None
    params: Mapping[str, np.ndarray] = field(default_factory=dict)


def export(net: Net, folder: Path, inputs: Sequence[Inputs], *outputs: str, **dtypes: Any) -> Export:
    """The file of a network; only onnxruntime can say what it computes."""
    return Export(net.save(folder, *outputs, **dtypes), inputs)


@dataclass(frozen=True)
class Case:
    """An export to make and to judge.

    Attributes:
        family: what it is listed under, such as "torchvision: classification".
        name: its name in the family.
        exporter: what writes the file, such as "torch.onnx (dynamo)".
        make: makes the file in a folder. Seeded; no downloads.
        needs: packages that it imports; without them it is skipped.
        tolerance: of outputs, of the largest element.
        slope: tolerance of gradients, of the largest element of each.
        known: why something about it is not as it should be, from outside this project: it names the exporter, the
            framework, onnxruntime or the specification. What it excuses: columns of the record, by name.
        light: quick, and made with what the tests have anyway: part of the default run.
    """

    family: str
    name: str
    exporter: str
    make: Callable[[Path], Export]
    needs: tuple[str, ...] = ()
    tolerance: float = 1e-4
    slope: float = 1e-4
    known: Mapping[str, str] = field(default_factory=dict)
    light: bool = False

    @property
    def id(self) -> str:
        return f"{self.family} / {self.name} / {self.exporter}"
