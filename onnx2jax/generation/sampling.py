"""Choosing the next token from logits: processors of the logits, then greedy, or random sampling within limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey

from .. import compat
from ..errors import InputTypeError, InputValueError, known_keywords
from ..ops.arrays import is_traced

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


@dataclass(frozen=True)
class UserFunction:
    """A user's function of two arrays, which is traced into the loop; errors name it.

    Attributes:
        role: the keyword that it was passed by.
        parameters: what it is called with.
        function: the function.

    Raises:
        InputTypeError: it takes other parameters, or has no hash.
    """

    role: str
    parameters: str
    function: Callable[[Any, Any], Any]

    def __post_init__(self) -> None:
        try:
            hash(self.function)
        except TypeError:
            raise InputTypeError(
                f"{self} has no hash, by which its compiled program is found: pass a function, or make the class a "
                "dataclass(frozen=True)"
            ) from None
        try:
            signature(self.function).bind(None, None)
        except TypeError:
            takes = ", ".join(signature(self.function).parameters)
            raise InputTypeError(f"{self} is called with ({self.parameters}), and takes ({takes})") from None
        except ValueError:  # a built-in function without a signature
            pass

    def __call__(self, first: Any, second: Any) -> Any:
        """What the function returns, as an array.

        Raises:
            InputTypeError: it needs the value of a traced array.
            InputValueError: it returns no array.
        """
        try:
            with compat.on_any_platform():
                result = self.function(first, second)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
            raise InputTypeError(
                f"{self} needs the value of an array, and it is traced into the compiled loop. Write it in pure JAX: "
                "jnp.where rather than if, and functions of jnp rather than of np, float or int"
            ).with_traceback(error.__traceback__) from None
        except Exception as error:
            error.add_note(f"inside {self}")
            raise
        try:
            return jnp.asarray(result)
        except (TypeError, ValueError):
            raise InputValueError(f"{self} returns {result!r:.80}, not an array") from None

    def __str__(self) -> str:
        return f"{self.role} {getattr(self.function, '__name__', type(self.function).__name__)!r}"


@dataclass(frozen=True)
class Sampling:
    """Samples the next token at random.

    Attributes:
        temperature: divides the logits; below 1 it sharpens the distribution, and 0 is greedy.
        top_k: keep the ``top_k`` likeliest tokens; 0 for all.
        top_p: keep the likeliest tokens whose probabilities sum to ``top_p``; 1 for all.
        min_p: keep tokens with at least ``min_p`` times the probability of the likeliest; 0 for all.

    The limits apply in this order, each to the renormalised distribution that the previous one leaves.

    Raises:
        InputNameError: there is no such keyword.
        InputValueError: a value is out of its range, or no number.

    >>> import jax, jax.numpy as jnp
    >>> Sampling(temperature=0.7, top_k=1)(jnp.array([[0.0, 3.0, 1.0]]), jax.random.key(0))
    Array([1], dtype=int32)
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name, (needed, accepts) in _ACCEPTED.items():
            value = getattr(self, name)
            if not is_traced(value) and not (_is_number(value) and accepts(float(value))):
                raise InputValueError(f"{name} is {value!r}; it is {needed}")

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


Sampling.__init__ = known_keywords(Sampling.__init__)  # type: ignore[method-assign]

_ACCEPTED: Final[Mapping[str, tuple[str, Callable[[float], bool]]]] = {
    "temperature": ("a number, 0 or more", lambda v: v >= 0),
    "top_k": ("a whole number, 0 or more", lambda v: v >= 0 and v % 1 == 0),
    "top_p": ("a number above 0, at most 1; temperature 0 takes the likeliest token", lambda v: 0 < v <= 1),
    "min_p": ("a number from 0 to 1", lambda v: 0 <= v <= 1),
}
"""The values that each attribute of ``Sampling`` takes."""


def _is_number(value: Any) -> bool:
    dtype = np.asarray(value).dtype if isinstance(value, int | float) else getattr(value, "dtype", np.dtype(object))
    return np.ndim(value) == 0 and (jnp.issubdtype(dtype, np.integer) or jnp.issubdtype(dtype, np.floating))


def _unflattened(_: None, leaves: Iterable[Any]) -> Sampling:
    """The sampling of any leaves: JAX passes what is no number, too."""
    new = object.__new__(Sampling)
    vars(new).update(zip(_ACCEPTED, leaves, strict=True))
    return new


jax.tree_util.register_pytree_with_keys(
    Sampling,
    lambda sampling: ([(GetAttrKey(n), getattr(sampling, n)) for n in _ACCEPTED], None),
    _unflattened,
    lambda sampling: ([getattr(sampling, n) for n in _ACCEPTED], None),
)


def as_arrays(sampling: Sampling) -> Sampling:
    """The sampling with arrays instead of Python numbers, so that all values share one compiled program.

    Raises:
        InputValueError: JAX built it of leaves that are out of their range.
    """
    values = vars(replace(sampling))
    top_k = jnp.asarray(min(values["top_k"], np.iinfo(np.int32).max), np.int32)
    return _unflattened(None, [top_k if n == "top_k" else jnp.asarray(values[n], np.float32) for n in _ACCEPTED])


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
        changed = function(tokens, logits)
        if changed.shape != logits.shape or not jnp.issubdtype(changed.dtype, np.floating):
            raise InputValueError(
                f"{function} returns {changed.dtype} {changed.shape}, not logits: float32 {logits.shape}"
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
