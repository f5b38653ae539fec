"""Generation: from prompts to texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from .. import compat
from ..errors import CacheError, InputShapeError, InputTypeError, InputValueError, UnsupportedError
from ..model.model import Model
from .beam import Beams, search
from .cache import Cache
from .compared import Compared
from .loop import State, endings
from .prompts import Prompts, as_endings, check_outside, choice, even, rows_of, whole
from .sampling import Chooser, Sampling
from .speculative import check_takes_back, speculate
from .steps import positions_in_tables


@dataclass(frozen=True)
class Generation:
    """Texts that a decoder has generated.

    Attributes:
        tokens: int64[batch, count], without the prompts. What ended a text is its last token; ``pad`` stands behind.
        lengths: int64[batch], the tokens of each.
        cache: of prompts and texts but for the texts' last tokens. ``generate(..., after=this)`` goes on with it.
        last: int64[batch, 1], those last tokens; [batch, 0] behind ``read``.
        rounds: of ``speculate``, how often the large decoder was asked for several tokens.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    cache: Cache
    last: np.ndarray
    rounds: int | None = None

    def texts(self) -> list[list[int]]:
        """The tokens of each text, as lists without padding."""
        return [row[:n].tolist() for row, n in zip(self.tokens, self.lengths, strict=True)]


class Decoder(Compared):
    """A decoder that generates. Made by ``onnx2jax.decoder``.

    Attributes:
        context: the most tokens, prompt included, that it was made for; None where that is not known.
        stop: what ends a text, unless ``generate`` is told otherwise.
        pad: the token that stands behind a text's end.
    """

    def __init__(
        self, model: Model, first: Model | None = None, *, stop: Sequence[Sequence[int]] = (), pad: int | None = None,
        context: int | None = None, embed: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(model, first, embed)
        limits = [n for n in (context, positions_in_tables(model.graph)) if n is not None]
        self.context = min(whole("context", n) for n in limits) if limits else None
        self.stop = tuple(map(tuple, stop))
        self._endings(self.stop)
        pad = pad if pad is not None else next((s[0] for s in self.stop if len(s) == 1), 0)
        self.pad = whole("pad", pad, np.iinfo(np.int32).min)

    @property
    def compilations(self) -> int:
        """Programs compiled to generate so far: one for prompts of a size, one for the loop."""
        return self._programs.compilations

    def generate(
        self, tokens: Prompts, max_new_tokens: int, *, sampling: str | Sampling | Chooser = "greedy",
        stop: Any = None, rng: Any = None, length: int | None = None, after: Generation | None = None, **others: Any,
    ) -> Generation:  # fmt: skip
        """Generate texts, in one program on the device.

        Args:
            tokens: token ids of one prompt or of several; lists may differ in length. Padding of an array is said by
                ``attention_mask``, which is 0 there, in front or behind.
            max_new_tokens: the most tokens of a text.
            sampling: "greedy", "temperature", "top_k", "top_p", "min_p"; ``Sampling(...)`` with numbers of your own;
                or a function from logits float32[batch, vocabulary] and a random key to tokens int32[batch].
            stop: what ends a text: a token, or several, each a token or a list of tokens. The decoder's own when left
                out; () for nothing.
            rng: random key, or a seed; 0 when left out.
            length: the tokens that the cache has room for: prompt and text, rounded up, when left out.
            after: what an earlier call gave, or ``read``: the tokens come behind its own.
            **others: further inputs of the model, such as what an encoder gives.

        Returns:
            The texts, and the cache.

        Raises:
            InputError: prompts that are empty, out of the vocabulary, too long for the cache or for the model, or of
                different lengths where nothing keeps padding out of sight.
            CacheError: the model gives other numbers with a cache of fixed length.

        >>> import onnx2jax
        >>> counting = onnx2jax.decoder(onnx2jax.demo_decoder())  # a token is a letter's ASCII code
        >>> texts = counting.generate(list(b"nineteen twenty "), 22)
        >>> bytes(texts.texts()[0])
        b'twenty-one twenty-two '
        """
        options = {"sampling": sampling, "stop": stop, "rng": rng, "length": length, "after": after}
        state, run = self._begin(tokens, max_new_tokens, **options, **others)
        state = run(state, max_new_tokens)
        tokens = np.asarray(state.tokens)[:, : int(state.count)].astype(np.int64)
        lengths = np.asarray(state.lengths, np.int64)
        self._check_chosen(tokens[np.arange(tokens.shape[1]) < lengths[:, None]])
        return Generation(tokens, lengths, state.cache, np.take_along_axis(tokens, lengths[:, None] - 1, axis=1))

    def stream(self, tokens: Prompts, max_new_tokens: int, **options: Any) -> Iterator[np.ndarray]:
        """Generate as ``generate`` does, token by token.

        Args:
            tokens, max_new_tokens, **options: as for ``generate``.

        Yields:
            The next token of each text, int64[batch]; ``pad`` for texts that have ended.
        """
        state, run = self._begin(tokens, max_new_tokens, **options)
        ended = np.zeros_like(state.done)
        for count in range(2, int(max_new_tokens) + 2):
            last = np.asarray(state.last, np.int64)
            self._check_chosen(last[~ended])
            yield last
            ended = np.asarray(state.done)
            if count > max_new_tokens or ended.all():
                return
            state = run(state, count)

    def beam_search(
        self, tokens: Prompts, max_new_tokens: int, *, beams: int = 4, length_penalty: float = 1.0,
        early_stopping: bool = False, stop: Any = None, length: int | None = None, **others: Any,
    ) -> Beams:  # fmt: skip
        """The likeliest texts, as a beam search finds them: of the best ``beams`` texts, all next tokens are weighed.

        Args:
            tokens, max_new_tokens, stop, length, **others: as for ``generate``.
            beams: the texts kept for each prompt, and returned.
            length_penalty: texts are compared by the sum of their log-probabilities divided by length ** this; above 0
                it prefers long texts.
            early_stopping: end when as many texts as ``beams`` have ended, rather than when none can be better.

        Raises:
            InputError, CacheError: as for ``generate``.
        """
        beams, power = whole("beams", beams), np.asarray(length_penalty)
        if power.ndim or power.dtype.kind not in "iuf" or not np.isfinite(power):
            raise InputValueError(f"length_penalty is {length_penalty!r}; it is a number")
        state, _ = self._begin(tokens, max_new_tokens, stop=stop, length=length, **others)
        others.pop("attention_mask", None)
        how = {
            "endings": self._endings(stop),
            "length_penalty": power.astype(np.float32),
            "early": np.bool_(early_stopping),
        }
        with compat.enable_x64():
            found = search(self._programs, state, beams, max_new_tokens, how, jax.tree.map(jax.numpy.array, others))
        lengths = np.asarray(found.lengths, np.int64)
        texts = np.asarray(found.ended).astype(np.int64)[:, :, : int(found.count)]
        behind = np.arange(texts.shape[2]) >= lengths[..., None]
        return Beams(np.where(behind, self.pad, texts), lengths, np.asarray(found.scores))

    def speculate(
        self, tokens: Prompts, max_new_tokens: int, draft: Decoder, *, count: int = 4, stop: Any = None,
        length: int | None = None, **others: Any,
    ) -> Generation:  # fmt: skip
        """Generate the texts of ``generate``, the likeliest, with fewer calls: a smaller decoder drafts some tokens.

        Several texts go on together, by as many tokens as are right in each of them.

        Args:
            tokens, max_new_tokens, stop, length, **others: as for ``generate``.
            draft: a faster decoder for the same tokens. The better it foretells this one, the fewer calls there are.
            count: the tokens drafted at a time.

        Returns:
            The texts; ``rounds`` says how often this decoder was asked.

        Raises:
            UnsupportedError: a decoder whose caches cannot take tokens back: states, or caches that slide.
            InputError, CacheError: as for ``generate``.
        """
        count = whole("count", count)
        if not isinstance(draft, Decoder):
            raise InputTypeError(f"draft is {type(draft).__name__}, not a decoder: onnx2jax.decoder(draft)")
        for each in (self, draft):
            check_takes_back(each)
        if self.vocabulary != draft.vocabulary:
            raise InputValueError(f"the draft tells {draft.vocabulary} tokens apart, and this one {self.vocabulary}")
        rows = rows_of(tokens, others.pop("attention_mask", None), self.vocabulary)
        room = self._room(max(map(len, rows)) + max_new_tokens + count + 1, length)
        options = {"stop": stop, "length": room}
        shared = {n: others[n] for n in draft.others if n in others}
        state, _ = self._begin(rows, max_new_tokens, **options, **others)
        small, _ = draft._begin(rows, max_new_tokens, **options, **shared)
        small = replace(small, last=state.last)
        with compat.enable_x64():
            given = jax.tree.map(jax.numpy.array, (others, shared))
        if state.cache.aligned or small.cache.aligned:
            raise UnsupportedError("the model counts places backwards, so no token can be taken back: use generate")
        self._prove_extension(state, rows, count + 1, given[0])
        how = {"endings": self._endings(stop), "pad": np.int32(self.pad)}
        with compat.enable_x64():
            done = speculate(self._programs, state, draft._programs, small, count, max_new_tokens, how, given)
        lengths = np.asarray(done.lengths, np.int64)
        texts = np.asarray(done.tokens).astype(np.int64)[:, : int(lengths.max())]
        texts = np.where(np.arange(texts.shape[1]) < lengths[:, None], texts, self.pad)
        return Generation(texts, lengths, done.cache, np.asarray(done.last, np.int64)[:, None], int(done.rounds))

    def read(self, tokens: Prompts, length: int, **others: Any) -> Generation:
        """Read prompts and generate nothing: a beginning that several calls of ``generate(..., after=it)`` share.

        Args:
            tokens: as for ``generate``.
            length: the tokens that the cache has room for, those of what comes after included.
            **others: further inputs of the model.
        """
        state, _ = self._begin(tokens, 1, length=length, **others)
        batch = state.last.shape[0]
        nothing = np.zeros((batch, 0), np.int64)
        return Generation(nothing, np.zeros(batch, np.int64), state.cache, nothing)

    def _begin(
        self, tokens: Prompts, count: int, *, sampling: Any = "greedy", stop: Any = None, rng: Any = None,
        length: int | None = None, after: Generation | None = None, **others: Any,
    ) -> tuple[State, Callable[[State, int], State]]:  # fmt: skip
        """The state behind the prompts, and what runs it on to so many tokens."""
        check_outside((tokens, rng, others))
        rows = rows_of(tokens, others.pop("attention_mask", None), self.vocabulary)
        count = whole("max_new_tokens", count)
        choose, how = choice(sampling, rng)
        how |= {"endings": self._endings(stop), "pad": np.int32(self.pad)}
        with compat.enable_x64():
            others = {n: jax.numpy.array(v) for n, v in others.items()}

        def run(state: State, limit: int) -> State:
            return self._programs.loop(state, limit, choose, how, others)

        if after is not None:
            if not isinstance(after, Generation):
                raise InputTypeError(f"after is {type(after).__name__}: what generate or read gave")
            if length not in (None, after.cache.length):
                raise InputValueError(
                    f"what came before has a cache for {after.cache.length} tokens: begin with length={length}"
                )
            more = np.concatenate([after.last, even(rows, len(after.last))], axis=1)
            self._check_room(after.cache, more.shape[1] + count)
            cache = self._continued(after, more, choose, how, others)
            given = more if self.embedding is None else self.embedding.of_prompts(more, others)
            state = self._programs.further(cache, given, choose, how, others)
            self._prove_further(cache, more, state, choose, how, others)
            return state, run
        if not self.pads:
            even(rows, why=self._no_padding)
        room = self._room(max(map(len, rows)) + count, length)
        layout = self._layout(rows, room, choose, how, others)
        return self._first(rows, room, layout, choose, how, others), run

    def _continued(self, after: Generation, more: np.ndarray, choose: Chooser, how: Any, others: Any) -> Cache:
        """The cache behind which more tokens come, int[batch, count], in a layout that suits its sequences."""
        cache = after.cache
        if len(set(after.lengths.tolist())) > 1 and (cache.aligned or not (self.masks or self.pads)):
            raise InputShapeError(
                f"the texts before are of {sorted(set(after.lengths.tolist()))} tokens, and nothing in the model "
                "masks what stands behind the shorter ones: generate from them one by one"
            )
        if not self._ragged(cache):
            return cache
        # They may come from prompts that were equally long, with which nothing was compared that is not.
        rows = [np.resize(row, min(6, cache.length) - i % 2) for i, row in enumerate(more)]
        layout = self._layout(rows, cache.length, choose, how, others)
        if layout != "apart" or cache.apart:
            return cache
        if (np.asarray(cache.live) != (np.arange(cache.length) < np.asarray(cache.lengths)[:, None])).any():
            raise CacheError("sequences of different lengths share their places in this cache: generate it anew")
        return replace(cache, apart=True)

    def _check_chosen(self, tokens: np.ndarray) -> None:
        """Refuse what a function of somebody's own has chosen and is no token."""
        if self.vocabulary is not None and tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocabulary:
            raise InputValueError(
                f"sampling gives {tokens.min()} to {tokens.max()}; tokens are 0 to {self.vocabulary - 1}"
            )

    def _endings(self, stop: Any) -> np.ndarray:
        """What ends a text, as programs take it; the decoder's own for None."""
        if stop is None:
            return endings(self.stop)
        found = as_endings(stop)
        largest = max((t for s in found for t in s), default=0)
        if self.vocabulary is not None and largest >= self.vocabulary:
            raise InputValueError(f"stop has token {largest}; they are 0 to {self.vocabulary - 1}")
        return endings(found)

    @property
    def _no_padding(self) -> str:
        """Why prompts cannot be padded."""
        if self._states:
            return "a state of the model would run on into padding"
        if self._one_logit:
            return "the model gives logits behind its last token alone"
        return "nothing in the model masks padding"

    def _room(self, wanted: int, length: int | None) -> int:
        """The length of the cache for so many tokens."""
        if self.context is not None and wanted > self.context:
            raise InputShapeError(f"prompt and text are {wanted} tokens, and the model was made for {self.context}")
        if length is None:
            length = self.fixed_length or -(-wanted // 64) * 64
            length = length if self.context is None else min(length, self.context)
        if wanted > whole("length", length, 0):
            raise InputShapeError(
                f"prompt and text are {wanted} tokens, and the cache has room for {length}: length={wanted}"
                + (", which this file's own caches have not" if self.fixed_length else "")
            )
        return length

    def _check_room(self, cache: Cache, more: int) -> None:
        if (wanted := int(cache.end) + more) > cache.length:
            raise InputShapeError(
                f"with what was read before, prompt and text are {wanted} tokens, and the cache has room for "
                f"{cache.length}: begin with length={wanted}"
            )
