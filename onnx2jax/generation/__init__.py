"""Text generation: fixed-length KV caches, prefill and step as pure functions, the decoding loop as one program.

- ``files``: loads a decoder from files; ``decoder``: the public class, a pytree; ``calls``: its calls;
  ``results``: what they return; ``arguments``: validates what they get; ``text``: tokenizer and chat template.
- ``steps``: prefill, step and extend; ``cache``: the KV caches they pass on; ``embedding``: token embeddings.
- ``graphs``, ``in_place``: graph rewrites for fixed-length caches; ``verified``: compares the logits
  before generating.
- ``loop``, ``beam``, ``speculative``: compiled decoding loops; ``sampling``: how the next token is chosen;
  ``program_folder``: compiled programs in ``cache_dir``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ..lazy import exports

if TYPE_CHECKING:
    from .beam import Beams
    from .results import Generation

__all__ = [
    "Beams",
    "Generation",
]

_MODULES: Final = {
    "Beams": "beam",
    "Generation": "results",
}

if not TYPE_CHECKING:  # for which every name would exist, misspelt or not
    __getattr__, __dir__ = exports(__name__, _MODULES)
