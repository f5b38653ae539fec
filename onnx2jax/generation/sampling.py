"""Choosing the next token from logits: processors of the logits, then greedy, or random sampling within limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import InputValueError

Sampler = Callable[[Any, Any], Any]
"""(logits float32[batch, vocabulary], PRNG key) -> the next token of each sequence, int32[batch]."""
Processor = Callable[[Any, Any], Any]
"""(tokens so far int32[batch, length], logits float32[batch, vocabulary]) -> other logits."""
EMPTY: Final = -1
"""In the tokens so far: no token."""
NO_LOGITS: Final = -(2**31)
"""In place of a token: the model's logits are NaN, or all -inf."""
NO_CHOICE: Final = NO_LOGITS + 1
"""The same, where processors made them so."""


class Choice(NamedTuple):
    """How the next token is chosen: static, and so part of a program's key.

    Attributes:
        sampler: chooses it from the logits.
        processors: change the logits before.
        logprobs: whether the log-probabilities of the tokens are returned.
    """

    sampler: Sampler
    processors: tuple[Processor, ...] = ()
    logprobs: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampling:
    """Samples the next token at random.

    Attributes:
        temperature: divides the logits; below 1 it sharpens the distribution, and 0 is greedy.
        top_k: keep the ``top_k`` likeliest tokens; 0 for all.
        top_p: keep the likeliest tokens whose probabilities sum to ``top_p``; 1 for all.
        min_p: keep tokens with at least ``min_p`` times the probability of the likeliest; 0 for all.

    The limits apply in this order, each to the renormalised distribution that the previous one leaves.

    >>> import jax, jax.numpy as jnp
    >>> Sampling(temperature=0.7, top_k=1)(jnp.array([[0.0, 3.0, 1.0]]), jax.random.key(0))
    Array([1], dtype=int32)
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __call__(self, logits: Any, key: Any) -> Any:
        """The next token of each sequence, int32[batch]."""
        logits = logits.astype(np.float32)
        order = jnp.argsort(-logits, axis=-1, stable=True)
        ranked = jnp.take_along_axis(logits, order, axis=-1)
        warm = ranked / jnp.where(self.temperature == 0, 1, self.temperature).astype(np.float32)
        rank = jnp.arange(logits.shape[-1], dtype=np.int32)
        kept = (rank < self.top_k) | jnp.equal(self.top_k, 0)
        likely = jax.nn.softmax(jnp.where(kept, warm, -jnp.inf))
        before = jnp.cumsum(likely, axis=-1) - likely
        kept &= (before < self.top_p) | jnp.greater_equal(self.top_p, 1)
        likely = jax.nn.softmax(jnp.where(kept, warm, -jnp.inf))
        kept &= likely >= self.min_p * likely[:, :1]
        kept = jnp.where(jnp.equal(self.temperature, 0), rank == 0, kept | (rank == 0))
        drawn = jax.random.categorical(key, jnp.where(kept, warm, -jnp.inf))
        return jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0].astype(np.int32)


def as_arrays(sampling: Sampling) -> Sampling:
    """The sampling with arrays instead of Python numbers, so that all values share one compiled program.

    Raises:
        InputValueError: a number is out of its range.
    """
    ranges = {"temperature": (0, np.inf), "top_k": (0, np.inf), "top_p": (0, 1), "min_p": (0, 1)}
    for field in fields(sampling):
        value, (low, high) = getattr(sampling, field.name), ranges[field.name]
        if np.asarray(value).dtype.kind not in "iuf" or np.ndim(value) or not low <= value <= high:
            raise InputValueError(f"{field.name} is {value}; it must be between {low} and {high}")
    if sampling.top_k != int(sampling.top_k):
        raise InputValueError(f"top_k is {sampling.top_k}, not a whole number")
    if sampling.top_p == 0:
        raise InputValueError("top_p is 0, which leaves no token; for the likeliest token use sampling='greedy'")
    numbers = (sampling.temperature, sampling.top_p, sampling.min_p)
    temperature, top_p, min_p = (jnp.asarray(v, np.float32) for v in numbers)
    return Sampling(temperature, jnp.asarray(min(sampling.top_k, np.iinfo(np.int32).max), np.int32), top_p, min_p)  # type: ignore[arg-type]


def greedy(logits: Any, key: Any = None) -> Any:
    """The likeliest token, int32[batch]; the first of ties, as in NumPy's argmax."""
    del key
    return jnp.argmax(logits, axis=-1).astype(np.int32)


def undecided(logits: Any) -> Any:
    """bool[...]: whether no token follows from logits [..., vocabulary], as one is NaN, or all are -inf."""
    top = jnp.max(logits, axis=-1)
    return jnp.isnan(top) | (top == -jnp.inf)


def processed(choice: Choice, tokens: Any, logits: Any, penalty: Any = None) -> Any:
    """The logits float32[batch, vocabulary] after the penalty for repetitions and the processors.

    Args:
        choice: has the processors.
        tokens: int32[batch, length], the tokens so far, right-aligned, with ``EMPTY`` on the left.
        logits: of the next token.
        penalty: divides positive logits of tokens that have occurred, and multiplies negative ones; None for none.

    Raises:
        InputValueError: a processor returns an array of another shape or type.
    """
    if penalty is not None:
        vocabulary = logits.shape[-1]
        rows = jnp.arange(len(tokens), dtype=np.int32)[:, None]
        places = rows, jnp.where(tokens == EMPTY, vocabulary, tokens)
        seen = jnp.zeros(logits.shape, bool).at[places].set(True, mode="drop")
        logits = jnp.where(seen, jnp.where(logits > 0, logits / penalty, logits * penalty), logits)
    for function in choice.processors:
        changed = jnp.asarray(function(tokens, logits))
        if changed.shape != logits.shape or not jnp.issubdtype(changed.dtype, np.floating):
            raise InputValueError(
                f"a logits processor returns {changed.dtype} {changed.shape}, not logits: float32 {logits.shape}"
            )
        logits = changed.astype(np.float32)
    return logits


BY_NAME: Final = {
    "greedy": greedy,
    "temperature": Sampling(),
    "top_k": Sampling(top_k=50),
    "top_p": Sampling(top_p=0.9),
    "min_p": Sampling(min_p=0.05),
}
"""Sampling methods by name."""
