"""Persists a decoder's compiled programs in ``cache_dir``; see runtime/program_cache.py."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Final

from ..ir.fingerprint import fingerprint
from ..model.model import Model
from ..runtime.program_cache import Entry, Kept, Store
from .graphs import compiled_models
from .steps import Steps

PACKAGE: Final = f"{__name__.split('.')[0]}."
"""Prefix of this package's modules: its functions are identified by name, as the package version is in each key."""


class ProgramFolder:
    """The persistent program cache of one decoder; inactive without a ``cache_dir``."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.store = Store.of(steps.model.settings.cache_dir)

    @property
    def is_portable(self) -> bool:
        """Whether programs are compiled so that all can be stored, without oneDNN: in a folder that a user names."""
        return self.store is not None and not self.store.is_users

    @cached_property
    def fingerprint(self) -> str | None:
        """Identifies the computation, whatever the parameter values; None with a user's operators or functions."""
        steps = self._steps
        types = steps.weights.types
        models = compiled_models(steps)
        if steps.embedding is not None:
            if steps.embedding.lookup is None:  # a user's function
                return None
            models.append(steps.embedding.lookup)
        fingerprints = [_fingerprint(m, types) for m in models]
        return None if None in fingerprints else repr((fingerprints, sorted(types.items())))

    def path(self, *key: Any) -> Entry | None:
        """The entry of the program with this key; None if the program cannot be persisted.

        Args:
            *key: strings, numbers, types, functions, tuples of these, and the folders of other decoders that the
                program uses.
        """
        if self.store is None or not self._steps.weights.on_one_cpu or self.fingerprint is None:
            return None
        parts = [_key_text(part) for part in key]
        return None if None in parts else self.store.path(self.fingerprint, self.is_portable, *parts)

    def read(self, entry: Entry | None) -> Kept | None:
        """The stored program of an entry, or None."""
        return None if entry is None or self.store is None else self.store.read(entry)

    def write(self, entry: Entry | None, kept: Kept | None) -> None:
        """Stores a program; does nothing without an entry or a program."""
        if entry is not None and kept is not None and self.store is not None:
            self.store.write(entry, kept)


def _fingerprint(model: Model, types: Mapping[str, Any]) -> str | None:
    digest = fingerprint(model.graph, types.keys(), model.settings)
    if digest is None or model.placement is not None:
        return None
    return repr((digest, model.constants))


def _key_text(part: Any) -> str | None:
    """A part of a key as text that is the same in every process; None for a user's function."""
    if isinstance(part, ProgramFolder):
        return part.fingerprint
    if isinstance(part, tuple):
        texts = [_key_text(p) for p in part]
        return None if None in texts else repr(texts)
    if not callable(part):
        return repr(part)
    module, name = getattr(part, "__module__", ""), getattr(part, "__qualname__", "")
    ours = module.startswith(PACKAGE) and getattr(sys.modules.get(module), name, None) is part
    return f"{module}.{name}" if ours else None
