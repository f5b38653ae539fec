"""From tokens to what a decoder takes that has inputs_embeds: by a function, or by a file of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax.numpy as jnp
import numpy as np

from ..errors import UnsupportedError
from ..model.caches import ROLES
from ..model.model import Model

PREFIX: Final = "embed/"
"""Before the names of its weights."""


class Embedding:
    """What makes embeddings of tokens.

    Where it is a model that takes more than tokens, such as what an encoder of images gives, that is for prompts alone:
    a token that is generated is looked up in the table of the model.

    Attributes:
        model: of prompts; None for a function.
        others: its inputs beside tokens.
        rows: what looks tokens up: the model or a part of it; None for a function.
    """

    def __init__(self, source: Model | Callable[[Any], Any]) -> None:
        self._function: Any = None if isinstance(source, Model) else source
        self.model = source if isinstance(source, Model) else None
        self.others: tuple[str, ...] = ()
        self.rows: Model | None = None
        if self.model is not None:
            names = [v.name for v in self.model.inputs]
            tokens = next((n for n in names if re.fullmatch(ROLES["tokens"], n)), None)
            if tokens is None:
                raise UnsupportedError(
                    f"no input of the embedding {self.model.graph.name!r} is for tokens: it has {names}"
                )
            self._tokens = tokens
            self.others = tuple(n for n in names if n != tokens)
            self.rows = _lookup(self.model, tokens) if self.others else self.model

    @property
    def params(self) -> Mapping[str, Any]:
        """The weights that tokens alone need, by name."""
        return {} if self.rows is None else {PREFIX + n: v for n, v in self.rows.params.items()}

    def beside(self, weights: Any) -> Any:
        """DeviceParams of a decoder, and these."""
        rows = self.rows
        return weights if rows is None else weights.merged(PREFIX, rows.weights, list(rows.weights.types))

    def __call__(self, params: Mapping[str, Any], tokens: Any) -> Any:
        """Embeddings [batch, count, size] of tokens int[batch, count], in a program."""
        if self.rows is None:
            return jnp.asarray(self._function(tokens))
        dtype = next(v.type.dtype for v in self.rows.inputs if v.name == self._tokens)  # type: ignore[union-attr]
        own = {n.removeprefix(PREFIX): v for n, v in params.items() if n.startswith(PREFIX)}
        return self.rows.apply(own, **{self._tokens: tokens.astype(dtype)})

    def of_prompts(self, tokens: np.ndarray, others: Mapping[str, Any]) -> Any:
        """What prompts become: tokens where nothing else is given, else embeddings, outside any program."""
        given = {n: np.asarray(others[n]) for n in self.others if n in others}
        if not given or self.model is None:
            return tokens
        dtype = next(v.type.dtype for v in self.model.inputs if v.name == self._tokens)  # type: ignore[union-attr]
        return self.model.run(None, {self._tokens: tokens.astype(dtype), **given})[0]


def _lookup(model: Model, tokens: str) -> Model:
    """The part of an embedding that looks tokens up in its table.

    Raises:
        UnsupportedError: it has no such part.
    """
    for node in model.graph.nodes:
        table = model.graph.initializers.get(node.inputs[0]) if node.inputs else None
        if node.op_type in ("Gather", "GatherBlockQuantized") and table is not None and table.ndim >= 2:
            rows = model.cut(outputs=[node.outputs[0]])
            if [v.name for v in rows.inputs] == [tokens]:
                return rows
    raise UnsupportedError(
        f"nothing in the embedding {model.graph.name!r} looks up tokens alone: give a function, "
        "decoder(..., embed=lambda tokens: table[tokens])"
    )
