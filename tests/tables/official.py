"""The official cases that fail, each with its reason. A case that starts to pass fails the suite until it leaves."""

from __future__ import annotations

FAILS: dict[str, str] = {}
