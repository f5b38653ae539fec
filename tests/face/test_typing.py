"""The user's program that `make lint` type-checks also runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import typed_use
from tests.support.tiers import extended

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax


@pytest.mark.parametrize(
    "example",
    [extended(e) if e is typed_use.generate else e for e in typed_use.EXAMPLES],
    ids=lambda example: example.__name__,
)
def test_a_typed_program_runs(example: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example()
