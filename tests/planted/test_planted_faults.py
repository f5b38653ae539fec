"""The faults of ``python -m tests.planted`` apply to the present source."""

from __future__ import annotations

import pytest

from tests.planted.faults import ROOT, load, problems


@pytest.mark.extended
def test_all_faults_apply() -> None:
    faults = load()
    assert problems(faults, ROOT) == {}
    assert len(faults) >= 80 and all(fault.what for fault in faults)
    assert all(bool(fault.fixes) == (fault.kind == "revert") for fault in faults)
