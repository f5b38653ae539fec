"""The calls of a decoder: arguments, cache layout and length, the state after the prompts, one token after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, overload

import jax
import numpy as np

from .. import compat
from ..errors import CacheError, InputShapeError, InputTypeError, InputValueError
from ..ir.fingerprint import fingerprint
from ..ir.graph import Graph
from ..model.model import Model
from .arguments import (
    One,
    Several,
    as_choice,
    check_generating,
    check_outside,
    device_arrays,
    one_text,
    prompt_rows,
    right_aligned,
    stacked,
    stop_sequences,
    whole_number,
)
from .beam import Beams
from .cache import Cache
from .loop import Controls, LoopState, stop_array, with_arrays
from .results import CacheSource, Generation
from .sampling import NO_CHOICE, NO_LOGITS, Choice
from .text import Reader, Tokenizer, conversations, split_stop
from .verified import VerifiedSteps, lost

MOST: Final = 128
"""Default maximum of new tokens, less where there is room for fewer."""


@dataclass
class DecoderCall:
    """A call that has read its prompts.

    Attributes:
        state: the state with the first token. The loop donates it.
        choice, controls: how each next token is chosen.
        limit: the maximum number of tokens.
        sequences: the tokens before each text, int64[count].
        strings: stop strings.
        reader: decodes the texts; None where neither the prompts are text nor stop strings are given.
        is_text: whether the prompts are text.
        is_single: whether they are one text.
    """

    state: LoopState
    choice: Choice
    controls: dict[str, Any]
    limit: int
    sequences: list[np.ndarray]
    strings: list[str]
    reader: Reader | None
    is_text: bool
    is_single: bool

    def result(self, generated: Generation | Beams) -> Any:
        """The tokens, or their texts if the prompts are text: a string for a single prompt, else a list."""
        if not self.is_text:
            return generated
        assert self.reader is not None
        if not self.strings:  # otherwise each token was read when it was chosen
            self.reader.read(generated.texts())
        self.reader.rest()
        return self.of_batch(self.reader.texts)

    def of_batch(self, values: list[str]) -> Any:
        """The one value if the prompt was a single text, else the list."""
        return values[0] if self.is_single and len(values) == 1 else values


class Calls(VerifiedSteps):
    """Verified steps, and how calls begin and go on.

    Attributes:
        context: the maximum number of tokens the model supports, prompt included; None if unknown.
        stop: the default stop sequences of ``generate``.
        pad: the padding token after the end of a text.
        tokenizer: encodes prompts and decodes texts; None for token ids alone.
    """

    def __init__(
        self, model: Model, first: Model | None = None, *, stop: Any = (), pad: int | None = None,
        context: int | None = None, embed: Any = None, tokenizer: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(model, first, embed)
        self._origin = model.origin  # of the whole file; that of a branch would be None
        self._is_merged = first is None and self._two_files
        limits = (whole_number("context", n) for n in (context, _rotary_table_length(model.graph)) if n is not None)
        self.context: int | None = min(limits, default=None)
        self.stop: tuple[tuple[int, ...], ...] = tuple(map(tuple, self._stop_sequences(stop)))
        pad = pad if pad is not None else next((s[0] for s in self.stop if len(s) == 1), 0)
        self.pad: int = whole_number("pad", pad, np.iinfo(np.int32).min)
        self.tokenizer: Tokenizer | None = None if tokenizer is None or tokenizer is False else Tokenizer(tokenizer)
        if self.tokenizer is not None:
            self.tokenizer.check()

    @overload
    def encode(self, prompt: One, *, continues: bool = False) -> list[int]: ...
    @overload
    def encode(self, prompt: Several, *, continues: bool = False) -> list[list[int]]: ...
    def encode(self, prompt: Any, *, continues: bool = False) -> Any:
        """The tokens of a text, or of a conversation by the chat template; of several, those of each.

        Args:
            prompt: a text, or messages ``[{"role": "user", "content": "..."}]``; or a list of these.
            continues: no special token begins the text, because it continues another.

        Raises:
            InputTypeError: the prompt is neither.
            InputValueError: there is no tokenizer, or no chat template, or it cannot render the messages.
            ImportError: tokenizers is not installed, or for a conversation jinja2.

        >>> import onnx2jax
        >>> onnx2jax.decoder(onnx2jax.demo_decoder()).encode("one ")
        [111, 110, 101, 32]
        """
        texts = conversations(prompt)
        if texts is None or texts[1]:
            return self._text.encode(prompt if texts is None else texts[0][0], continues=continues)
        return [self._text.encode(p, continues=continues) for p in texts[0]]

    def decode(self, tokens: Any) -> str:
        """The text of tokens, without special ones.

        Args:
            tokens: the token ids of one text: int[count], [1, count] or [count, 1].

        Raises:
            InputValueError: there is no tokenizer; or the tokens are those of several texts, no whole numbers, or
                outside the vocabulary.
            ImportError: tokenizers is not installed.

        >>> import onnx2jax
        >>> onnx2jax.decoder(onnx2jax.demo_decoder()).decode([111, 110, 101, 32])
        'one '
        """
        return self._text.decode(one_text(tokens, self.vocabulary))

    @cached_property
    def _source(self) -> CacheSource:
        caches = tuple((n, str(b.dtype), tuple(b.dims)) for n, b in self.pairs.items())
        graphs = [m.graph for m in ((self.model, self.first) if self._two_files else (self.model,))]
        initializers = {inner.key(n) for graph in graphs for inner in graph.walk() for n in inner.initializers}
        return CacheSource(graphs[0].name, caches, tuple(fingerprint(g, initializers) for g in graphs))

    @property
    def _text(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InputValueError(
                "text needs a tokenizer, and there is no tokenizer.json beside the model: pass token ids (at a "
                "terminal: --prompt-ids 1,2,3), or decoder(..., tokenizer=folder)"
            )
        return self.tokenizer

    def _begin(
        self, function: Callable[..., Any], prompts: Any, count: int | None, others: Mapping[str, Any], *,
        sampling: Any = "greedy", stop: Any = None, rng: Any = None, length: int | None = None,
        after: Generation | None = None, repetition_penalty: Any = 1.0, logits_processors: Any = (),
        logprobs: bool = False, spare: int = 0,
    ) -> DecoderCall:  # fmt: skip
        """The call of a public ``function`` with the prompts read and the first token chosen.

        ``others``: its further keywords. ``spare``: slots that the call needs beyond prompt and text.
        """
        prompts = list(prompts) if isinstance(prompts, Iterator) else prompts
        check_outside((prompts, rng, sampling, others, jax.tree.leaves(self) if "_structure" in vars(self) else None))
        accepted = {v.name for m in (self.first, self.model) for v in m.inputs} | set(self.others) | {"attention_mask"}
        check_generating(others, accepted, self.others, function)
        if after is not None:
            self._check_continues(after)
        others, (strings, stop) = dict(others), split_stop(stop)
        if strings and function.__name__ not in ("generate", "stream"):  # which compare them with the text
            raise InputValueError(
                f"stop is {strings[0]!r}: strings stop generate and stream; here give tokens, "
                "stop=[decoder.encode(text)]"
            )
        stop = self.stop if stop is None else self._stop_sequences(stop)
        texts = conversations(prompts)
        if texts is not None:
            if logprobs:
                raise InputValueError(
                    "logprobs are those of tokens, so the prompt must be tokens as well: "
                    "generate(decoder.encode(prompt), ..., logprobs=True)"
                )
            prompts = [self._text.encode(p, continues=after is not None) for p in texts[0]]
            if empty := [i for i, tokens in enumerate(prompts) if not tokens]:
                raise InputValueError(f"prompt {empty[0]} is an empty text; it needs one token or more")
        rows = prompt_rows(prompts, others.pop("attention_mask", None), self.vocabulary)
        sequences = rows
        if after is not None:
            rows = list(stacked(rows, len(after.last)))
            sequences = [np.concatenate(both) for both in zip(after.sequences, rows, strict=True)]
        reader = Reader(self._text, sequences, strings) if texts is not None or strings else None
        used = 0 if after is None else int(after.cache.end) + after.last.shape[1]
        used += max(map(len, rows)) + spare
        count = self._most(used, length, after) if count is None else whole_number("max_new_tokens", count)
        choice, controls = as_choice(sampling, rng, logits_processors, repetition_penalty, logprobs)
        with compat.enable_x64():
            others = device_arrays(others)
        controls |= {"stop": stop_array(stop), "pad": np.int32(self.pad), "others": others}
        if after is None and not self.supports_padding:
            stacked(rows, why=self._padding_unsupported)
        room = self._room(used + count, length, after)
        if choice.processors or "repetition_penalty" in controls:
            controls["prompts"] = right_aligned(sequences, room)
        if after is None:
            layout, verified = self._layout(rows, room, choice, controls)
            state = verified or self._prefill(rows, room, layout, choice, controls)
        else:
            state = self._resumed(after, np.stack(rows), choice, controls)
        sequences = [r.astype(np.int64) for r in sequences]
        is_text, is_single = texts is not None, texts is not None and texts[1]
        return DecoderCall(state, choice, controls, count, sequences, strings, reader, is_text, is_single)

    def _each_token(self, call: DecoderCall) -> Iterator[tuple[np.ndarray, list[str], LoopState]]:
        """After each token: the last tokens int64[batch], what they add to the texts, and the state.

        Stop strings end their texts. The next iteration donates the state.
        """
        state, ended = call.state, np.zeros_like(call.state.done)
        for count in range(2, call.limit + 2):
            last = np.asarray(state.last, np.int64)
            self._check_chosen(last[:, None], ~ended[:, None], count - 2)
            pieces = call.reader.add(last, ~ended) if call.reader is not None else []
            ended = np.asarray(state.done)
            if call.reader is not None and (call.reader.ended & ~ended).any():
                ended = ended | call.reader.ended
                state = with_arrays(state, done=ended)
            yield last, pieces, state
            if count > call.limit or ended.all():
                return
            state = self._programs.loop(state, count, call.choice, call.controls)

    def _check_continues(self, after: Any) -> None:
        """Checks that ``after`` is a result of a decoder of this graph.

        Raises:
            InputTypeError: it is no result.
            InputValueError: it is another decoder's.
        """
        if not isinstance(after, Generation):
            raise InputTypeError(f"after is {type(after).__name__}: pass a result of generate or read")
        if after.source is not None and (difference := self._source.difference(after.source)):
            raise InputValueError(
                f"after is a result of another decoder: {difference}. A KV cache serves the graph that computed it; "
                "without after=, generate from all tokens: [[*old, *new] for old, new in zip(after.sequences, tokens)]"
            )

    def _resumed(self, after: Generation, more: np.ndarray, choice: Choice, controls: Controls) -> LoopState:
        """The state after ``more`` tokens int[batch, n] that continue the texts of ``after``."""
        more = np.concatenate([after.last, more], axis=1)
        cache = self._resumed_cache(after, more, choice, controls)
        state = self._programs.resume(cache, self._embedded(more, controls), choice, controls)
        self._verify_resume(cache, more, state, choice, controls)
        return state

    def _resumed_cache(self, after: Generation, more: np.ndarray, choice: Choice, controls: Controls) -> Cache:
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
        layout, _ = self._layout(rows, cache.length, choice, controls)
        if layout != "apart" or cache.apart:
            return cache
        if (np.asarray(cache.live) != (np.arange(cache.length) < np.asarray(cache.lengths)[:, None])).any():
            raise CacheError(
                "sequences of different lengths share the slots of this cache: generate again from the full prompts"
            )
        return replace(cache, apart=True)

    def _check_chosen(self, tokens: np.ndarray, live: Any, before: int = 0) -> None:
        """Checks the chosen tokens int64[batch, count], of which ``live`` are no padding, after ``before`` others.

        Raises:
            InputValueError: sampling chose one outside the vocabulary; or none, as processors leave none.
            CacheError: none could be chosen, as the model's logits are NaN.
        """
        chosen = tokens[live]
        known = chosen[chosen > NO_CHOICE]  # first: one outside the vocabulary may make the next logits NaN
        if self.vocabulary is not None and known.size and not 0 <= known.min() <= known.max() < self.vocabulary:
            raise InputValueError(
                f"sampling returns {known.min()} to {known.max()}; tokens are 0 to {self.vocabulary - 1}"
            )
        if known.size < chosen.size:
            row, column = np.argwhere(live & (tokens <= NO_CHOICE))[0].tolist()
            where = f"text {row}, token {before + column + 1}"
            if tokens[row, column] == NO_LOGITS:
                raise CacheError(lost(where))
            raise InputValueError(f"{where}: logits_processors leave no token, as all logits are -inf, or one is NaN")

    def _stop_sequences(self, stop: Any) -> list[list[int]]:
        """Stop sequences, each as a list of tokens in the vocabulary."""
        sequences = stop_sequences(stop)
        largest = max((t for s in sequences for t in s), default=0)
        if self.vocabulary is not None and largest >= self.vocabulary:
            raise InputValueError(f"stop has token {largest}; tokens are 0 to {self.vocabulary - 1}")
        return sequences

    def _most(self, used: int, length: int | None, after: Generation | None) -> int:
        """The default maximum of new tokens after ``used`` slots: MOST, or as many as there is room for."""
        limits = [length, self.context, self.fixed_length] if after is None else [after.cache.length]
        room = min((n for n in limits if n is not None), default=used + MOST)
        return max(1, min(MOST, room - used))

    @property
    def _padding_unsupported(self) -> str:
        """Why the model does not support padded prompts."""
        if self._has("state"):
            return "padding would change the recurrent state of the model"
        if self._last_logits_only:
            return "the model returns the logits of the last token alone"
        return "the model has no mask for padding"

    def _room(self, wanted: int, length: int | None, after: Generation | None) -> int:
        """The cache length for ``wanted`` tokens: that of ``after``, ``length``, or else ``wanted`` rounded up."""
        if after is not None:
            if length not in (None, after.cache.length):
                raise InputValueError(
                    f"after has a cache of length {after.cache.length}; for another, begin with length={length}"
                )
            length = after.cache.length
        elif self.context is not None and wanted > self.context:
            raise InputShapeError(f"prompt and text are {wanted} tokens, and the model supports {self.context}")
        elif length is None:
            length = self.fixed_length or -(-wanted // 64) * 64
            length = length if self.context is None else min(length, self.context)
        if wanted > (length := whole_number("length", length, 0)):
            continued, begin = ("", "") if after is None else ("with the tokens of after, ", "begin with ")
            raise InputShapeError(
                f"{continued}prompt and text are {wanted} tokens, and the cache has room for {length}: {begin}"
                f"length={wanted}" + (", but this file declares a fixed length" if self.fixed_length else "")
            )
        return length


def _rotary_table_length(graph: Graph) -> int | None:
    """The number of positions in the shortest rotary table; None if there is none."""
    readers = (node for node in graph.nodes if node.op_type in ("GroupQueryAttention", "RotaryEmbedding"))
    tables = (graph.initializers[n] for node in readers for n in node.inputs if "cos" in n and n in graph.initializers)
    return min((table.shape[0] for table in tables if table.ndim == 2), default=None)
