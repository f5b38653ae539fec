"""A decoder's programs in ``cache_dir``, for the next process: see runtime/store.py."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from ..ir.fingerprint import fingerprint
from ..model.model import Model
from ..runtime.optimize.executable import Kept
from ..runtime.store import Store
from .graphs import deciding
from .steps import Steps

OWN: Final = f"{__name__.split('.')[0]}."
"""Where the functions lie whose meaning is that of this package's version."""


class Folder:
    """What was compiled for a decoder, as files; none where its model has no ``cache_dir``."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        folder = steps.model.settings.cache_dir
        self._store = Store(folder) if folder else None

    @cached_property
    def meaning(self) -> str | None:
        """What the decoder computes, whatever its weights; None where that cannot be said."""
        steps = self._steps
        types = steps.weights.types
        models = deciding(steps)
        if steps.embedding is not None:
            if steps.embedding.rows is None:  # a function of a user's own
                return None
            models.append(steps.embedding.rows)
        said = [_meaning(m, types) for m in models]
        return None if None in said else repr((said, sorted(types.items())))

    def path(self, *key: Any) -> Path | None:
        """Where a program with this key is kept; None where it is not.

        Args:
            *key: texts, numbers, types, functions, and the folders of other decoders that take part.
        """
        if self._store is None or self.meaning is None:
            return None
        parts = [_said(part) for part in key]
        return None if None in parts else self._store.path(self.meaning, *parts)

    def read(self, path: Path | None) -> Kept | None:
        """The program kept there, if there is one."""
        return None if path is None or self._store is None else self._store.read(path)

    def write(self, path: Path | None, kept: Kept | None) -> None:
        """Keep a program, where it can be."""
        if path is not None and kept is not None and self._store is not None:
            self._store.write(path, kept)


def _meaning(model: Model, types: Mapping[str, Any]) -> str | None:
    digest = fingerprint(model.graph, types.keys())
    if digest is None or model.placement is not None:
        return None
    return repr((digest, model.by_value, model.settings.max_trips))


def _said(part: Any) -> str | None:
    """A part of a key as a text that is the same in another process; None for functions of a user's own."""
    if isinstance(part, Folder):
        return part.meaning
    if not callable(part):
        return repr(part)
    module, name = getattr(part, "__module__", ""), getattr(part, "__qualname__", "")
    ours = module.startswith(OWN) and getattr(sys.modules.get(module), name, None) is part
    return f"{module}.{name}" if ours else None
