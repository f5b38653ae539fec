"""What the tables of torch's features are written with: modules from functions, operands by size, a case for each."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .case import Case, Export
from .torch_exports import EXPORTERS, export

Build = Callable[[], Any]
Operands = Callable[[int], Sequence[Any]]


class Lazy:
    """A module that is imported when something of it is asked for: tables speak of torch where there is none."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # doctest asks every value of a module what it wraps
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


torch: Any = Lazy("torch")
nn: Any = Lazy("torch.nn")
F: Any = Lazy("torch.nn.functional")


@dataclass(frozen=True)
class Feature:
    """A row: what of torch is exported, and what of it the exporters can write.

    Attributes:
        name: its name in the table.
        build: makes the module, or the layers that are each applied to the same operands.
        operands: for a size; they are made for two sizes, and what differs in their shapes is dynamic.
        exporters: those that can write it.
        opset: the exporter's default when None.
        fixed: one size, as the exporters bake it in.
        known: of the Case, by exporter.
        tolerance: of outputs and gradients, for types of fewer digits than float32.
    """

    name: str
    build: Build
    operands: Operands
    exporters: Sequence[str] = EXPORTERS
    opset: int | None = None
    fixed: bool = False
    known: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    tolerance: float = 1e-4
    needs: tuple[str, ...] = ("torch", "onnxscript")


def using(layers: Callable[[], Sequence[Any]], call: Callable[..., Any]) -> Build:
    """A module that computes a function of its layers and its operands."""

    def build() -> Any:
        class Using(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(layers())

            def forward(self, *operands: Any) -> Any:
                return call(self.layers, *operands)

        return Using()

    return build


def of(call: Callable[..., Any]) -> Build:
    """A module that computes a function of its operands."""
    return using(tuple, lambda _, *operands: call(*operands))


def each(*layers: Callable[[], Any]) -> Build:
    """A module that applies each of several layers to its operands."""
    return using(lambda: [make() for make in layers], lambda all, *operands: tuple(one(*operands) for one in all))


def excused(reason: str, *columns: str, by: Sequence[str] = EXPORTERS) -> dict[str, dict[str, str]]:
    """What a reason from outside excuses: columns of the record, of the files of some exporters."""
    return {exporter: dict.fromkeys(columns, reason) for exporter in by}


def f(*shape: int, dtype: str = "float32") -> Any:
    """Standard normal numbers."""
    return torch.randn(shape).to(getattr(torch, dtype))


def positive(*shape: int) -> Any:
    """Numbers between 0.1 and 1.1."""
    return torch.rand(shape) + 0.1


def i(*shape: int, low: int = 0, high: int = 10, dtype: str = "int64") -> Any:
    """Integers from low to below high."""
    return torch.randint(low, high, shape).to(getattr(torch, dtype))


def b(*shape: int) -> Any:
    """Booleans."""
    return torch.rand(shape) > 0.4


def ramp(*shape: int) -> Any:
    """Different numbers in no order: without ties, for what sorts and selects."""
    count = 1
    for extent in shape:
        count *= extent
    return (torch.randperm(count).reshape(shape) - count / 2) / 8


def cases(tables: Mapping[str, Sequence[Feature]]) -> tuple[Case, ...]:
    """A case for each feature of each family, and each exporter that writes it."""
    return tuple(
        _case(family, feature, exporter)
        for family, features in tables.items()
        for feature in features
        for exporter in feature.exporters
    )


def _case(family: str, feature: Feature, exporter: str) -> Case:
    def make(folder: Path) -> Export:
        torch.manual_seed(0)
        module = feature.build()
        sizes = [feature.operands(n) for n in ((3,) if feature.fixed else (3, 4))]
        return export(module, sizes, folder, exporter, opset=feature.opset)

    name = feature.name if feature.opset is None else f"{feature.name}, opset {feature.opset}"
    known = feature.known.get(exporter, {})
    return Case(family, name, exporter, make, feature.needs, feature.tolerance, feature.tolerance, known)
