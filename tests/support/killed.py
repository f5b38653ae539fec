"""Stops work before one of its disk operations, as if the process had been killed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class Killed(BaseException):
    """Ends a save like SIGKILL: afterwards nothing is written, and no cleanup runs."""


def killed(monkeypatch: pytest.MonkeyPatch, at: int, work: Callable[[], object]) -> bool:
    """Runs work until its disk operation of a number; whether it was stopped there."""
    done = 0

    def limited(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            done += 1
            if done > at:
                raise Killed
            return original(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("replace", "unlink", "fsync", "chmod", "truncate"):
            patch.setattr(os, name, limited(getattr(os, name)))
        patch.setattr(Path, "open", limited(Path.open))
        patch.setattr(shutil, "copyfileobj", limited(shutil.copyfileobj))
        try:
            work()
        except Killed:
            return True
    return False
