"""``check`` beside the checker of the onnx package with full_check, on more than a thousand broken models."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

import onnx2jax
from tests.checker.mutants import Mutant, models, mutants, verdicts

STRINGS = "nodes that read strings are not evaluated; a call refuses it"
LAXER = {("sparse", "AttributeProto.f cleared"): "a writer of proto3 leaves out a value of 0"} | dict.fromkeys(
    [
        ("tables", "AttributeProto.ints emptied"),
        ("tables", "AttributeProto.ints first doubled"),
        ("tables", "AttributeProto.ints first removed"),
        ("tables", "AttributeProto.strings emptied"),
        ("tables", "AttributeProto.strings first doubled"),
        ("tables", "AttributeProto.strings first removed"),
        ("tables", "Dimension.dim_value far"),
        ("tables", "Dimension.dim_value raised"),
        ("tables", "NodeProto.attribute emptied"),
        ("tables", "NodeProto.attribute first removed"),
        ("tables", "TensorShapeProto.dim emptied"),
        ("tables", "TensorShapeProto.dim first doubled"),
    ],
    "what reads strings is not evaluated: a LabelEncoder is refused in the first call",
)
"""Why ``check`` has no finding where the onnx package refuses the model."""
WARNED = {
    "GR-18": "the computed type counts, the declared one is a hint",
    "GR-20": "the computed type counts, the declared one is a hint",
    "ND-15": "free extents of the operands may be such that they fit",
}
"""Why ``check`` only warns where the onnx package refuses the model, by rule."""


class Row(NamedTuple):
    """A mutant, what the onnx package says ("" if it accepts it), and the rules of our errors and warnings."""

    mutant: Mutant
    theirs: str
    errors: frozenset[str]
    warnings: frozenset[str]

    @property
    def kind(self) -> str:
        """How the two compare."""
        if self.errors:
            return "both reject" if self.theirs else "stricter"
        if not self.theirs:
            return "warned of" if self.warnings else "both accept"
        return "laxer, warned of" if self.warnings else "laxer"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    folder = tmp_path_factory.mktemp("mutants")
    (folder / "w.bin").write_bytes(bytes(8))
    return compared(folder)


def compared(folder: Path) -> list[Row]:
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for mutant, theirs in zip(mutants(), verdicts(), strict=True):
            report = onnx2jax.check(mutant.model, external_data_dir=folder)
            errors = frozenset(f.rule for f in report.errors)
            found.append(Row(mutant, theirs, errors, frozenset(f.rule for f in report.findings) - errors))
    return found


def test_where_it_is_laxer_there_is_a_reason(rows: list[Row]) -> None:
    assert {(row.mutant.base, row.mutant.kind) for row in rows if row.kind == "laxer"} == LAXER.keys()
    warned = [row.warnings for row in rows if row.kind == "laxer, warned of"]
    assert all(rules <= WARNED.keys() for rules in warned)
    assert frozenset().union(*warned) == WARNED.keys()


def test_the_models_are_valid_and_the_mutants_many(rows: list[Row], tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(8))
    for name, model in models().items():
        assert str(onnx2jax.check(model, external_data_dir=tmp_path)) == "no findings", name
    assert len(rows) >= 900
    assert sum(row.kind == "both reject" for row in rows) >= 600


def test_the_page_has_the_table(rows: list[Row]) -> None:
    page = Path(__file__).parents[2].joinpath("docs", "guides", "errors.md").read_text(encoding="utf-8")
    assert table(rows) in page, f"docs/guides/errors.md must have\n{table(rows)}"


def table(rows: list[Row]) -> str:
    """How many mutants of each message of the format both reject, one of the two, or none."""
    kinds = ("both reject", "both accept", "stricter", "warned of", "laxer, warned of", "laxer")
    counts = Counter((row.mutant.kind.partition(".")[0], row.kind) for row in rows)
    counts.update(("all", row.kind) for row in rows)
    lines = [f"| changed message | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for name in [*sorted({name for name, _ in counts if name != "all"}), "all"]:
        lines.append(f"| {name} | {' | '.join(str(counts[name, kind]) for kind in kinds)} |")
    return "\n".join(lines)
