"""``Decoder``: generates texts from prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import compat
from ..errors import CacheError, InputShapeError, InputTypeError, InputValueError, UnsupportedError
from ..ir.graph import Graph
from ..model.model import Model
from .beam import Beams, search
from .cache import Cache
from .loop import State, stop_array
from .prompts import (
    Prompts,
    as_array,
    as_sampler,
    check_outside,
    device_arrays,
    prompt_rows,
    stacked,
    stop_sequences,
    whole_number,
)
from .sampling import Sampler, Sampling
from .speculative import check_can_roll_back, speculate
from .verified import VerifiedSteps


@dataclass(frozen=True)
class Generation:
    """Generated texts, and the KV cache to continue them with.

    Attributes:
        tokens: int64[batch, count], without the prompts, padded with ``pad`` after the end of a text; includes the stop
            token that ended it.
        lengths: int64[batch], the number of tokens of each text.
        cache: the KV cache of prompts and texts, except the last token of each text. Pass this object as
            ``generate(..., after=)`` to continue.
        last: int64[batch, 1], those last tokens; [batch, 0] after ``read``.
        rounds: for ``speculate``, the number of calls of the large decoder; else None.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    cache: Cache
    last: np.ndarray
    rounds: int | None = None

    def texts(self) -> list[list[int]]:
        """The tokens of each text, as lists without padding."""
        return [row[:n].tolist() for row, n in zip(self.tokens, self.lengths, strict=True)]


class Decoder(VerifiedSteps):
    """A decoder that generates text. Created by ``onnx2jax.decoder``.

    Attributes:
        context: the maximum number of tokens the model supports, prompt included; None if unknown.
        stop: the default stop sequences of ``generate``.
        pad: the padding token after the end of a text.
    """

    def __init__(
        self, model: Model, first: Model | None = None, *, stop: Sequence[Sequence[int]] = (), pad: int | None = None,
        context: int | None = None, embed: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(model, first, embed)
        limits = [n for n in (context, _rotary_table_length(model.graph)) if n is not None]
        self.context = min(whole_number("context", n) for n in limits) if limits else None
        self.stop = tuple(map(tuple, stop))
        self._stop_array(self.stop)
        pad = pad if pad is not None else next((s[0] for s in self.stop if len(s) == 1), 0)
        self.pad = whole_number("pad", pad, np.iinfo(np.int32).min)

    @property
    def compilations(self) -> int:
        """Number of programs compiled so far: one per padded prompt size, one per loop."""
        return self._programs.compilations

    def generate(
        self, tokens: Prompts, max_new_tokens: int, *, sampling: str | Sampling | Sampler = "greedy",
        stop: Any = None, rng: Any = None, length: int | None = None, after: Generation | None = None, **others: Any,
    ) -> Generation:  # fmt: skip
        """Generates texts in one compiled loop on the device.

        Args:
            tokens: token ids of one prompt or of several; lists may differ in length. An array [batch, count] may be
                padded left or right, with ``attention_mask`` 0 at the padding.
            max_new_tokens: the maximum number of tokens to generate for each prompt.
            sampling: "greedy", "temperature", "top_k", "top_p", "min_p"; ``Sampling(...)`` for other settings; or a
                function from logits float32[batch, vocabulary] and a PRNG key to tokens int32[batch].
            stop: stop sequences: a token, or several, each a token or a list of tokens. Defaults to ``self.stop``; ()
                for none.
            rng: PRNG key or seed; defaults to 0.
            length: cache length in tokens; defaults to prompt and text, rounded up.
            after: a result of ``generate`` or ``read`` to continue: ``tokens`` are appended to its texts.
            **others: further inputs of the model, such as the outputs of an encoder.

        Returns:
            The texts and the KV cache.

        Raises:
            InputError: a prompt is empty, outside the vocabulary, or too long for the cache or the model; or prompts
                differ in length and the model cannot mask padding.
            CacheError: the model's logits differ with a fixed-length cache.

        >>> import onnx2jax
        >>> counting = onnx2jax.decoder(onnx2jax.demo_decoder())  # tokens are ASCII codes
        >>> texts = counting.generate(list(b"nineteen twenty "), 22)
        >>> bytes(texts.texts()[0])
        b'twenty-one twenty-two '
        """
        max_new_tokens = whole_number("max_new_tokens", max_new_tokens)
        options = {"sampling": sampling, "stop": stop, "rng": rng, "length": length, "after": after}
        state, run = self._begin(tokens, max_new_tokens, **options, **others)
        state = run(state, max_new_tokens)
        tokens = np.asarray(state.tokens)[:, : int(state.count)].astype(np.int64)
        lengths = np.asarray(state.lengths, np.int64)
        self._check_chosen(tokens[np.arange(tokens.shape[1]) < lengths[:, None]])
        return Generation(tokens, lengths, state.cache, np.take_along_axis(tokens, lengths[:, None] - 1, axis=1))

    def stream(self, tokens: Prompts, max_new_tokens: int, **options: Any) -> Iterator[np.ndarray]:
        """Generates as ``generate`` does, yielding each token as soon as it is available.

        Args:
            tokens, max_new_tokens, **options: as for ``generate``.

        Yields:
            The next token of each text, int64[batch]; ``pad`` for texts that have ended.
        """
        max_new_tokens = whole_number("max_new_tokens", max_new_tokens)
        state, run = self._begin(tokens, max_new_tokens, **options)
        ended = np.zeros_like(state.done)
        for count in range(2, max_new_tokens + 2):
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
        """The likeliest texts found by a beam search, best first.

        Args:
            tokens, max_new_tokens, stop, length, **others: as for ``generate``.
            beams: number of beams for each prompt, and of texts returned.
            length_penalty: texts are ranked by the sum of their log-probabilities divided by length ** length_penalty;
                values above 0 favour long texts.
            early_stopping: end as soon as ``beams`` texts are finished, rather than when none can be improved.

        Raises:
            InputError, CacheError: as for ``generate``.
        """
        beams, max_new_tokens = whole_number("beams", beams), whole_number("max_new_tokens", max_new_tokens)
        power = as_array("length_penalty", length_penalty)
        if power.ndim or power.dtype.kind not in "iuf" or not np.isfinite(power):
            raise InputValueError(f"length_penalty is {length_penalty!r}, not a finite number")
        if not isinstance(early_stopping, bool | np.bool_):
            raise InputValueError(f"early_stopping is {early_stopping!r}, not True or False")
        state, _ = self._begin(tokens, max_new_tokens, stop=stop, length=length, **others)
        others.pop("attention_mask", None)
        controls = {
            "stop": self._stop_array(stop),
            "length_penalty": power.astype(np.float32),
            "early": np.bool_(early_stopping),
        }
        with compat.enable_x64():
            found = search(self._programs, state, beams, max_new_tokens, controls, device_arrays(others))
        lengths = np.asarray(found.lengths, np.int64)
        texts = np.asarray(found.finished).astype(np.int64)[:, :, : int(found.count)]
        padding = np.arange(texts.shape[2]) >= lengths[..., None]
        return Beams(np.where(padding, self.pad, texts), lengths, np.asarray(found.scores))

    def speculate(
        self, tokens: Prompts, max_new_tokens: int, draft: Decoder, *, count: int = 4, stop: Any = None,
        length: int | None = None, **others: Any,
    ) -> Generation:  # fmt: skip
        """Generates the greedy texts of ``generate`` with fewer calls, by speculative decoding with a draft decoder.

        The texts of a batch advance together, by the smallest number of tokens accepted in any of them.

        Args:
            tokens, max_new_tokens, stop, length, **others: as for ``generate``.
            draft: a faster decoder with the same vocabulary; the more of its tokens are accepted, the fewer calls.
            count: number of tokens drafted per round.

        Returns:
            The texts; ``rounds`` is the number of calls of this decoder.

        Raises:
            UnsupportedError: a cache of either decoder cannot be rolled back: a recurrent state, or a sliding window.
            InputError, CacheError: as for ``generate``.
        """
        count, max_new_tokens = whole_number("count", count), whole_number("max_new_tokens", max_new_tokens)
        if not isinstance(draft, Decoder):
            raise InputTypeError(f"draft is {type(draft).__name__}, not a Decoder: draft=onnx2jax.decoder(...)")
        for each in (self, draft):
            check_can_roll_back(each)
        if self.vocabulary != draft.vocabulary:
            raise InputValueError(
                f"the draft decoder has a vocabulary of {draft.vocabulary}, and this one of {self.vocabulary}"
            )
        rows = prompt_rows(tokens, others.pop("attention_mask", None), self.vocabulary)
        room = self._room(max(map(len, rows)) + max_new_tokens + count + 1, length)
        options = {"stop": stop, "length": room}
        shared = {n: others[n] for n in draft.others if n in others}
        state, _ = self._begin(rows, max_new_tokens, **options, **others)
        small, _ = draft._begin(rows, max_new_tokens, **options, **shared)
        small = replace(small, last=state.last)
        with compat.enable_x64():
            inputs = device_arrays(others), device_arrays(shared)
        if state.cache.aligned or small.cache.aligned:
            raise UnsupportedError("the model needs a right-aligned cache, which cannot be rolled back: use generate")
        self._verify_extend(state, rows, count + 1, inputs[0])
        controls = {"stop": self._stop_array(stop), "pad": np.int32(self.pad)}
        with compat.enable_x64():
            done = speculate(self._programs, state, draft._programs, small, count, max_new_tokens, controls, inputs)
        lengths = np.asarray(done.lengths, np.int64)
        texts = np.asarray(done.tokens).astype(np.int64)[:, : int(lengths.max())]
        texts = np.where(np.arange(texts.shape[1]) < lengths[:, None], texts, self.pad)
        return Generation(texts, lengths, done.cache, np.asarray(done.last, np.int64)[:, None], int(done.rounds))

    def read(self, tokens: Prompts, length: int, **others: Any) -> Generation:
        """Prefills a cache with prompts without generating, for several calls of ``generate(..., after=)`` to share.

        Args:
            tokens: as for ``generate``.
            length: cache length in tokens, including all later prompts and texts.
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
        """The state after the prompts with its first token, and a function that runs it until a number of tokens."""
        tokens = list(tokens) if isinstance(tokens, Iterator) else tokens
        check_outside((tokens, rng, others))
        rows = prompt_rows(tokens, others.pop("attention_mask", None), self.vocabulary)
        choose, controls = as_sampler(sampling, rng)
        controls |= {"stop": self._stop_array(stop), "pad": np.int32(self.pad)}
        with compat.enable_x64():
            others = device_arrays(others)

        def run(state: State, limit: int) -> State:
            return self._programs.loop(state, limit, choose, controls, others)

        if after is not None:
            if not isinstance(after, Generation):
                raise InputTypeError(f"after is {type(after).__name__}: pass a result of generate or read")
            if length not in (None, after.cache.length):
                raise InputValueError(
                    f"after has a cache of length {after.cache.length}; for another, begin with length={length}"
                )
            more = np.concatenate([after.last, stacked(rows, len(after.last))], axis=1)
            self._check_room(after.cache, more.shape[1] + count)
            cache = self._resumed_cache(after, more, choose, controls, others)
            fed = more if self.embedding is None else self.embedding.embed_prompts(more, others)
            state = self._programs.resume(cache, fed, choose, controls, others)
            self._verify_resume(cache, more, state, choose, controls, others)
            return state, run
        if not self.supports_padding:
            stacked(rows, why=self._padding_unsupported)
        room = self._room(max(map(len, rows)) + count, length)
        layout, verified = self._layout(rows, room, choose, controls, others)
        return verified or self._prefill(rows, room, layout, choose, controls, others), run

    def _resumed_cache(self, after: Generation, more: np.ndarray, choose: Sampler, controls: Any, others: Any) -> Cache:
        """The cache of ``after`` in a layout that can be extended by ``more``, int[batch, count]."""
        cache = after.cache
        if len(set(after.lengths.tolist())) > 1 and (
            cache.aligned or not (self.masks_padding or self.supports_padding)
        ):
            raise InputShapeError(
                f"the texts of after have {sorted(set(after.lengths.tolist()))} tokens, and the model cannot mask the "
                "padding of the shorter ones: generate from each separately"
            )
        if not self._ragged(cache):
            return cache
        # The prompts may have had equal lengths, so that only equal lengths were verified.
        rows = [np.resize(row, min(6, cache.length) - i % 2) for i, row in enumerate(more)]
        layout, _ = self._layout(rows, cache.length, choose, controls, others)
        if layout != "apart" or cache.apart:
            return cache
        if (np.asarray(cache.live) != (np.arange(cache.length) < np.asarray(cache.lengths)[:, None])).any():
            raise CacheError(
                "sequences of different lengths share the slots of this cache: generate again from the full prompts"
            )
        return replace(cache, apart=True)

    def _check_chosen(self, tokens: np.ndarray) -> None:
        """Checks the tokens that a sampling function returned.

        Raises:
            InputValueError: one is outside the vocabulary.
        """
        if self.vocabulary is not None and tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocabulary:
            raise InputValueError(
                f"sampling returns {tokens.min()} to {tokens.max()}; tokens are 0 to {self.vocabulary - 1}"
            )

    def _stop_array(self, stop: Any) -> np.ndarray:
        """Stop sequences as an array; the decoder's default for None."""
        if stop is None:
            return stop_array(self.stop)
        found = stop_sequences(stop)
        largest = max((t for s in found for t in s), default=0)
        if self.vocabulary is not None and largest >= self.vocabulary:
            raise InputValueError(f"stop has token {largest}; tokens are 0 to {self.vocabulary - 1}")
        return stop_array(found)

    @property
    def _padding_unsupported(self) -> str:
        """Why the model does not support padded prompts."""
        if self._has_state:
            return "padding would change the recurrent state of the model"
        if self._last_logits_only:
            return "the model returns the logits of the last token alone"
        return "the model has no mask for padding"

    def _room(self, wanted: int, length: int | None) -> int:
        """The cache length for ``wanted`` tokens: ``length`` if given, else ``wanted`` rounded up."""
        if self.context is not None and wanted > self.context:
            raise InputShapeError(f"prompt and text are {wanted} tokens, and the model supports {self.context}")
        if length is None:
            length = self.fixed_length or -(-wanted // 64) * 64
            length = length if self.context is None else min(length, self.context)
        if wanted > (length := whole_number("length", length, 0)):
            raise InputShapeError(
                f"prompt and text are {wanted} tokens, and the cache has room for {length}: length={wanted}"
                + (", but this file declares a fixed length" if self.fixed_length else "")
            )
        return length

    def _check_room(self, cache: Cache, more: int) -> None:
        if (wanted := int(cache.end) + more) > cache.length:
            raise InputShapeError(
                f"with the tokens of after, prompt and text are {wanted} tokens, and the cache has room for "
                f"{cache.length}: begin with length={wanted}"
            )


def _rotary_table_length(graph: Graph) -> int | None:
    """The number of positions in the shortest rotary table; None if there is none."""
    tables = [
        graph.initializers[n].shape[0]
        for node in graph.nodes
        if node.op_type in ("GroupQueryAttention", "RotaryEmbedding")
        for n in node.inputs
        if "cos" in n and n in graph.initializers and graph.initializers[n].ndim == 2
    ]
    return min(tables, default=None)
