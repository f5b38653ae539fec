"""All cases of the zoo."""

from __future__ import annotations

from typing import Final

from . import classic, old_classifiers
from .case import Case

CASES: Final[tuple[Case, ...]] = (*classic.CASES, *old_classifiers.CASES)
