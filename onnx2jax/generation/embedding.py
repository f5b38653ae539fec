"""Token embeddings for decoders with inputs_embeds, by a function or by a separate model."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from .. import compat
from ..errors import UnsupportedError
from ..model.caches import ROLES
from ..model.model import Model
from ..proto.types import TensorType

PREFIX: Final = "embed/"
"""Prefix of the embedding's parameter names."""


class Embedding:
    """Computes embeddings from tokens, by a function or a model.

    A model may have further inputs, such as image features; these are for prompts alone. A generated token is looked up
    in the model's embedding table.

    Attributes:
        model: embeds prompts; None for a function.
        others: its inputs other than tokens.
        lookup: embeds tokens alone: the model or a part of it; None for a function.
        function: that function, or None.
    """

    def __init__(self, source: Model | Callable[[Any], Any]) -> None:
        self.function: Any = None if isinstance(source, Model) else source
        self.model: Model | None = source if isinstance(source, Model) else None
        self.others: tuple[str, ...] = ()
        self.lookup: Model | None = None
        self._is_changed = False
        if self.model is not None:
            types = {v.name: v.type for v in self.model.inputs}
            tokens = next((n for n in types if re.fullmatch(ROLES["tokens"], n)), "")
            if not isinstance(kind := types.get(tokens), TensorType):
                raise UnsupportedError(
                    f"the embedding model {self.model.graph.name!r} has no token input such as input_ids: "
                    f"it has {[*types]}"
                )
            self._tokens, self._dtype = tokens, kind.dtype
            self.others = tuple(n for n in types if n != tokens)
            self.lookup = _lookup(self.model, tokens) if self.others else self.model

    def over(self, lookup: Model | None) -> Embedding:
        """The same embedding with other values of the parameters of ``lookup``; without any for None."""
        new = copy.copy(self)
        vars(new).pop("_whole", None)
        new.model = lookup if self.model is self.lookup else self.model
        new.lookup, new._is_changed = lookup, True
        return new

    @cached_property
    def _whole(self) -> Model | None:
        """The model that embeds prompts, with the parameters of ``lookup``."""
        if self.model is None or self.lookup is None or self.model is self.lookup or not self._is_changed:
            return self.model
        return self.model.with_params(self.lookup.params)

    def __call__(self, params: Mapping[str, Any], tokens: Any) -> Any:
        """Embeddings [batch, count, size] of tokens int[batch, count]; traceable."""
        if self.lookup is None:
            with compat.on_any_platform():
                return jnp.asarray(self.function(tokens))
        rows = {n.removeprefix(PREFIX): v for n, v in params.items() if n.startswith(PREFIX)}
        return self.lookup.apply(rows, **{self._tokens: tokens.astype(self._dtype)})

    def embed_prompts(self, tokens: np.ndarray, others: Mapping[str, Any]) -> Any:
        """Embeddings of prompts if one of ``others`` is given, else the tokens themselves; runs the model eagerly."""
        features = {n: np.asarray(others[n]) for n in self.others if n in others}
        if not features or (model := self._whole) is None:
            return tokens
        return model.run(None, {self._tokens: tokens.astype(self._dtype), **features})[0]


def _lookup(model: Model, tokens: str) -> Model:
    """The part of an embedding model that looks tokens up in its table.

    Raises:
        UnsupportedError: no Gather from a table depends on tokens alone.
    """
    for node in model.graph.nodes:
        table = model.graph.initializers.get(node.inputs[0]) if node.inputs else None
        if node.op_type in ("Gather", "GatherBlockQuantized") and table is not None and table.ndim >= 2:
            rows = model.cut(outputs=[node.outputs[0]])
            if [v.name for v in rows.inputs] == [tokens]:
                return rows
    raise UnsupportedError(
        f"no node of the embedding model {model.graph.name!r} looks up tokens alone: give a function, "
        "decoder(..., embed=lambda tokens: table[tokens])"
    )
