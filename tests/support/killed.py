"""Work that ends before one of its disk operations, as if the process had been killed there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class Killed(BaseException):
    """Ends a save like a signal: from then on nothing reaches the disk, no cleaning up either."""


def killed(monkeypatch: pytest.MonkeyPatch, at: int, work: Callable[[], object]) -> bool:
    """Whether the work was ended before its disk operation of that number."""
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
