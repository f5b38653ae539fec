"""Each export of the zoo: right numbers at each size, jit and gradients in 32 bits, or a reason from outside."""

from __future__ import annotations

import importlib.util
import json
import re
import warnings
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.support.helpers import ROOT

from .case import Case
from .families import CASES
from .judge import judge

RECORDS = ROOT / ".venv" / "zoo"
"""One file for each case judged; `python -m docs.make_exporters` makes the page of them."""


def test_each_case_has_a_line_without_a_fault_in_the_page() -> None:
    lines = json.loads((ROOT / "docs" / "exporters.json").read_text())
    ids = [case.id for case in CASES]
    assert len(set(ids)) == len(ids)
    assert sorted(ids) == sorted(f"{r['family']} / {r['name']} / {r['exporter']}" for r in lines)
    assert not [r for r in lines if r["faults"]]


CANARIES = {(c.family, c.exporter): c for c in reversed(CASES) if c.light}.values()
"""The first light case of each family and exporter, in the main tier; the other light ones are extended."""


def marks(case: Case) -> tuple[pytest.MarkDecorator, ...]:
    if case in CANARIES:
        return ()
    return (pytest.mark.extended if case.light else pytest.mark.zoo,)


@pytest.mark.parametrize("case", [pytest.param(c, id=c.id, marks=marks(c)) for c in CASES])
def test_export(case: Case, tmp_path: Path) -> None:
    for package in case.needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; the extra 'zoo' has it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of exporters
        export = case.make(tmp_path)
    record, faults = judge(case, export)
    RECORDS.mkdir(parents=True, exist_ok=True)
    line = json.dumps(asdict(record) | {"faults": faults})
    (RECORDS / (re.sub(r"[^\w.-]+", "_", case.id) + ".json")).write_text(line)
    assert not faults, "\n".join(faults)
