"""All cases of the zoo."""

from __future__ import annotations

from typing import Final

from . import classic, old_classifiers, old_detectors, old_language
from .case import Case

CASES: Final[tuple[Case, ...]] = (*classic.CASES, *old_classifiers.CASES, *old_detectors.CASES, *old_language.CASES)
