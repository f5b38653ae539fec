"""A decoder's compiled programs in ``cache_dir``, for later processes: see runtime/program_cache.py."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

from ..ir.fingerprint import fingerprint
from ..model.model import Model
from ..runtime.executable import Kept
from ..runtime.program_cache import Entry, Store
from .graphs import deciding
from .steps import Steps

OWN: Final = f"{__name__.split('.')[0]}."
"""The prefix of the package's own modules, whose functions its version describes."""


class Folder:
    """The folder of a decoder's compiled programs; it keeps none where the model has no ``cache_dir``."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        folder = steps.model.settings.cache_dir
        self._store = Store(folder) if folder else None

    @cached_property
    def meaning(self) -> str | None:
        """What the decoder computes, for any values of its weights; None with a user's operators or functions."""
        steps = self._steps
        types = steps.weights.types
        models = deciding(steps)
        if steps.embedding is not None:
            if steps.embedding.rows is None:  # a function of a user's own
                return None
            models.append(steps.embedding.rows)
        said = [_meaning(m, types) for m in models]
        return None if None in said else repr((said, sorted(types.items())))

    def path(self, *key: Any) -> Entry | None:
        """The entry for a program with this key; None where none is kept.

        Args:
            *key: texts, numbers, types, functions, and the folders of other decoders that take part.
        """
        if self._store is None or self.meaning is None:
            return None
        parts = [_said(part) for part in key]
        return None if None in parts else self._store.path(self.meaning, *parts)

    def read(self, entry: Entry | None) -> Kept | None:
        """The entry's program, if there is one."""
        return None if entry is None or self._store is None else self._store.read(entry)

    def write(self, entry: Entry | None, kept: Kept | None) -> None:
        """Keep a program, where there is an entry for it."""
        if entry is not None and kept is not None and self._store is not None:
            self._store.write(entry, kept)


def _meaning(model: Model, types: Mapping[str, Any]) -> str | None:
    digest = fingerprint(model.graph, types.keys(), model.settings)
    if digest is None or model.placement is not None:
        return None
    return repr((digest, model.constants))


def _said(part: Any) -> str | None:
    """A part of a key as text that is equal in every process; None for a user's function."""
    if isinstance(part, Folder):
        return part.meaning
    if not callable(part):
        return repr(part)
    module, name = getattr(part, "__module__", ""), getattr(part, "__qualname__", "")
    ours = module.startswith(OWN) and getattr(sys.modules.get(module), name, None) is part
    return f"{module}.{name}" if ours else None
