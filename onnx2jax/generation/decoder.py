"""``Decoder``: generates texts from prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from inspect import getmembers, isfunction
from typing import Any, Final, overload

import jax
import numpy as np
from jax.tree_util import DictKey

from .. import compat
from ..errors import (
    CacheError,
    InputNameError,
    InputShapeError,
    InputTypeError,
    InputValueError,
    ModelError,
    UnsupportedError,
)
from ..ir.analysis import parameters
from ..model.caches import complete_feeds, dtype_of
from ..proto.origin import Origin
from .arguments import One, Prompts, Several, as_array, prompt_rows, whole_number
from .beam import Beams, search
from .calls import Calls, DecoderCall
from .embedding import PREFIX
from .loop import LoopState, Programs
from .results import Generation
from .sampling import Processor, Sampler, Sampling
from .speculative import check_can_roll_back, speculate
from .steps import FIRST
from .text import conversations
from .verified import lost


class Decoder(Calls):
    """A decoder that generates text. Created by ``onnx2jax.decoder``.

    A pytree: its leaves are ``params``, all else is static. Inside JAX's transformations call ``prefill``, ``step`` and
    ``extend``; ``generate`` and the other methods run programs of their own.

    Attributes:
        context: the maximum number of tokens the model supports, prompt included; None if unknown.
        stop: the default stop sequences of ``generate``.
        pad: the padding token after the end of a text.
        tokenizer: encodes prompts and decodes texts; None for token ids alone.
    """

    @property
    def compilations(self) -> int:
        """Number of programs compiled so far: one per padded prompt size, one per loop."""
        return self._programs.compilations

    @property
    def origin(self) -> Origin:
        """The file, for ``onnx2jax.save``.

        Raises:
            ModelError: there are several files, or the graph is not that of a file.
        """
        names = {"": "model", FIRST: "first", PREFIX: "embedding.lookup"}
        parts = [names[prefix] for prefix in self._parts if prefix != FIRST or not self._is_merged]
        if len(parts) > 1:
            calls = ", ".join(f"onnx2jax.save(decoder.{part}, '{part.rpartition('.')[2]}.onnx')" for part in parts)
            raise ModelError(f"the decoder consists of {len(parts)} files, which are saved one by one: {calls}")
        if self._origin is None:
            raise ModelError(
                "save writes the graph of a file, and the decoder's Model was given another graph. Its weights alone: "
                "onnx2jax.training.save_checkpoint(path, decoder.params)"
            )
        return self._origin

    def changed(self) -> dict[str, Any]:
        """Parameters that differ from the file, by name, in its element types."""
        return {**self.first.changed(), **self.model.changed()}

    @overload
    def generate(self, tokens: One, max_new_tokens: int | None = None, **options: Any) -> str: ...
    @overload
    def generate(self, tokens: Several, max_new_tokens: int | None = None, **options: Any) -> list[str]: ...
    @overload
    def generate(self, tokens: Prompts, max_new_tokens: int | None = None, **options: Any) -> Generation: ...
    def generate(
        self, tokens: Prompts, max_new_tokens: int | None = None, *, sampling: str | Sampling | Sampler = "greedy",
        stop: Any = None, rng: Any = None, length: int | None = None, after: Generation | None = None,
        repetition_penalty: float = 1.0, logits_processors: list[Processor] | tuple[Processor, ...] = (),
        logprobs: bool = False, **others: Any,
    ) -> Any:  # fmt: skip
        """Generates texts in one compiled loop on the device.

        Args:
            tokens: a prompt or several: texts; conversations, ``[{"role": "user", "content": "..."}]``, which the chat
                template beside the model turns into text; or token ids. Lists of token ids may differ in length, and
                an array [batch, count] may be padded left or right, with ``attention_mask`` 0 at the padding.
            max_new_tokens: the maximum number of tokens to generate for each prompt; defaults to 128, or what there is
                room for.
            sampling: "greedy", "temperature", "top_k", "top_p", "min_p"; ``Sampling(...)`` for other settings; or a
                function from logits float32[batch, vocabulary] and a PRNG key to tokens int32[batch].
            stop: stop sequences: a token, or several, each a token or a list of tokens. Defaults to ``self.stop``; ()
                for none. Or strings, in addition to these: a text ends with the first that it contains. They are
                compared with the decoded text after each token, which is then a call of its own.
            rng: PRNG key or seed; defaults to 0.
            length: cache length in tokens; defaults to prompt and text, rounded up.
            after: a result of ``generate`` or ``read`` to continue: ``tokens`` are appended to its texts. It is this
                decoder's, or that of one with the same graph and other weights, whose keys and values stay in it.
            repetition_penalty: divides positive logits of tokens that have occurred in prompt or text, and multiplies
                negative ones; 1 for none.
            logits_processors: functions ``f(tokens_so_far, logits)`` that return other logits float32[batch,
                vocabulary], applied in turn before ``sampling``. ``tokens_so_far`` is int32[batch, length]: prompt and
                text, right-aligned, with -1 on the left. They are traced into the loop, and each function object
                compiles programs of its own.
            logprobs: whether to return the log-probability of each token, for prompts of token ids.
            **others: further inputs of the model, such as the outputs of an encoder.

        Returns:
            The text, or a list of texts, without the prompts, if these are text. For token ids a Generation: the
            tokens, and the KV cache to continue with.

        Raises:
            InputError: a prompt is empty, outside the vocabulary, or too long for the cache or the model; or prompts
                differ in length and the model cannot mask padding; or a prompt is text, without a tokenizer; or
                ``after`` is of a decoder with another graph.
            CacheError: the model's logits differ with a fixed-length cache.
            ImportError: a prompt is text, and tokenizers is not installed.

        >>> import onnx2jax
        >>> counting = onnx2jax.decoder(onnx2jax.demo_decoder())
        >>> counting.generate("nineteen twenty ", 22)
        'twenty-one twenty-two '
        >>> counting.generate(list(b"nineteen twenty "), 4).texts()  # tokens are ASCII codes
        [[116, 119, 101, 110]]
        """
        call = self._begin(
            self.generate, tokens, max_new_tokens, others, sampling=sampling, stop=stop, rng=rng, length=length,
            after=after, repetition_penalty=repetition_penalty, logits_processors=logits_processors, logprobs=logprobs,
        )  # fmt: skip
        if call.strings:
            *_, (_, _, state) = self._each_token(call)
        else:
            state = self._programs.loop(call.state, call.limit, call.choice, call.controls)
        likelihoods = None if state.logprobs is None else np.asarray(state.logprobs)[:, : int(state.count)]
        return call.result(self._generation(call, state, logprobs=likelihoods))

    def _generation(self, call: DecoderCall, state: LoopState, **fields: Any) -> Generation:
        """The tokens of a finished loop, checked."""
        lengths = np.asarray(state.lengths, np.int64)
        tokens = np.asarray(state.tokens)[:, : int(lengths.max())].astype(np.int64)
        live = np.arange(tokens.shape[1]) < lengths[:, None]
        self._check_chosen(tokens, live)
        tokens = np.where(live, tokens, self.pad)
        last = np.take_along_axis(tokens, lengths[:, None] - 1, axis=1)
        source = None if call.is_text else self._source  # the digest of a graph takes a while
        return Generation(tokens, lengths, state.cache, last, prompts=call.sequences, source=source, **fields)

    @overload
    def stream(self, tokens: One, max_new_tokens: int | None = None, **options: Any) -> Iterator[str]: ...
    @overload
    def stream(self, tokens: Several, max_new_tokens: int | None = None, **options: Any) -> Iterator[list[str]]: ...
    @overload
    def stream(self, tokens: Prompts, max_new_tokens: int | None = None, **options: Any) -> Iterator[np.ndarray]: ...
    def stream(
        self, tokens: Prompts, max_new_tokens: int | None = None, *, sampling: str | Sampling | Sampler = "greedy",
        stop: Any = None, rng: Any = None, length: int | None = None, after: Generation | None = None,
        repetition_penalty: float = 1.0, logits_processors: list[Processor] | tuple[Processor, ...] = (), **others: Any,
    ) -> Iterator[Any]:  # fmt: skip
        """Generates as ``generate`` does, yielding text or tokens as soon as they are available.

        Args:
            tokens, max_new_tokens, sampling, stop, rng, length, after, repetition_penalty, logits_processors, **others:
                as for ``generate``.

        Yields:
            The next piece of the text, or of each text as a list. For token ids the next token of each text,
            int64[batch]; ``pad`` for texts that have ended.

        >>> import onnx2jax
        >>> "|".join(onnx2jax.decoder(onnx2jax.demo_decoder()).stream("nineteen ", 6))
        't|w|e|n|t|y'
        """
        call = self._begin(
            self.stream, tokens, max_new_tokens, others, sampling=sampling, stop=stop, rng=rng, length=length,
            after=after, repetition_penalty=repetition_penalty, logits_processors=logits_processors,
        )  # fmt: skip
        for last, pieces, _ in self._each_token(call):
            if not call.is_text:
                yield last
            elif any(pieces):
                yield call.of_batch(pieces)
        if call.is_text and call.reader is not None and any(rest := call.reader.rest()):
            yield call.of_batch(rest)

    @overload
    def beam_search(self, tokens: One, max_new_tokens: int | None = None, **options: Any) -> str: ...
    @overload
    def beam_search(self, tokens: Several, max_new_tokens: int | None = None, **options: Any) -> list[str]: ...
    @overload
    def beam_search(self, tokens: Prompts, max_new_tokens: int | None = None, **options: Any) -> Beams: ...
    def beam_search(
        self, tokens: Prompts, max_new_tokens: int | None = None, *, beams: int = 4, length_penalty: float = 1.0,
        early_stopping: bool = False, stop: Any = None, length: int | None = None, **others: Any,
    ) -> Any:  # fmt: skip
        """The likeliest texts found by a beam search, best first.

        Args:
            tokens, max_new_tokens, stop, length, **others: as for ``generate``.
            beams: number of beams for each prompt, and of texts returned.
            length_penalty: texts are ranked by the sum of their log-probabilities divided by length ** length_penalty;
                values above 0 favour long texts.
            early_stopping: end as soon as ``beams`` texts are finished, rather than when none can be improved.

        Returns:
            The best text, or a list of the best for each prompt, if prompts are text. For token ids Beams.

        Raises:
            InputError, CacheError: as for ``generate``.
        """
        beams = whole_number("beams", beams)
        power = as_array("length_penalty", length_penalty)
        if power.ndim or power.dtype.kind not in "iuf" or not np.isfinite(power):
            raise InputValueError(f"length_penalty is {length_penalty!r}, not a finite number")
        if not isinstance(early_stopping, bool | np.bool_):
            raise InputValueError(f"early_stopping is {early_stopping!r}, not True or False")
        call = self._begin(self.beam_search, tokens, max_new_tokens, others, stop=stop, length=length)
        controls = call.controls | {"length_penalty": power.astype(np.float32), "early": np.bool_(early_stopping)}
        with compat.enable_x64():
            done = search(self._programs, call.state, beams, call.limit, controls)
        if len(rows := np.argwhere(np.isnan(done.scores).any(axis=1))):
            raise CacheError(lost(f"prompt {rows[0, 0]}"))
        lengths = np.asarray(done.lengths, np.int64)
        tokens = np.asarray(done.finished).astype(np.int64)[:, :, : int(done.count)]
        padding = np.arange(tokens.shape[2]) >= lengths[..., None]
        return call.result(Beams(np.where(padding, self.pad, tokens), lengths, np.asarray(done.scores)))

    @overload
    def speculate(self, tokens: One, max_new_tokens: int | None, draft: Decoder, **options: Any) -> str: ...
    @overload
    def speculate(self, tokens: Several, max_new_tokens: int | None, draft: Decoder, **options: Any) -> list[str]: ...
    @overload
    def speculate(self, tokens: Prompts, max_new_tokens: int | None, draft: Decoder, **options: Any) -> Generation: ...
    def speculate(
        self, tokens: Prompts, max_new_tokens: int | None, draft: Decoder, *, count: int = 4, stop: Any = None,
        length: int | None = None, **others: Any,
    ) -> Any:  # fmt: skip
        """Generates the greedy texts of ``generate`` with fewer calls, by speculative decoding with a draft decoder.

        The texts of a batch advance together, by the smallest number of tokens accepted in any of them.

        Args:
            tokens, max_new_tokens, stop, length, **others: as for ``generate``.
            draft: a faster decoder with the same vocabulary; the more of its tokens are accepted, the fewer calls.
            count: number of tokens drafted per round.

        Returns:
            As ``generate``; ``rounds`` of a Generation is the number of calls of this decoder.

        Raises:
            UnsupportedError: a cache of either decoder cannot be rolled back: a recurrent state, or a sliding window.
            InputError, CacheError: as for ``generate``.
        """
        count = whole_number("count", count)
        if not isinstance(draft, Decoder):
            raise InputTypeError(f"draft is {type(draft).__name__}, not a Decoder: draft=onnx2jax.decoder(...)")
        for each in (self, draft):
            check_can_roll_back(each)
        if self.vocabulary != draft.vocabulary:
            raise InputValueError(
                f"the draft decoder has a vocabulary of {draft.vocabulary}, and this one of {self.vocabulary}"
            )
        call = self._begin(self.speculate, tokens, max_new_tokens, others, stop=stop, length=length, spare=count + 1)
        room, shared = call.state.cache.length, {n: others[n] for n in draft.others if n in others}
        small = draft._begin(self.speculate, call.sequences, call.limit, shared, stop=stop, length=room)
        draft_state = replace(small.state, last=call.state.last)
        if call.state.cache.aligned or small.state.cache.aligned:
            raise UnsupportedError("the model needs a right-aligned cache, which cannot be rolled back: use generate")
        self._verify_extend(call.state, call.sequences, count + 1, call.choice, call.controls)
        controls = call.controls | {"draft": small.controls["others"]}
        done = speculate(self._programs, call.state, draft._programs, draft_state, count, call.limit, controls)
        return call.result(self._generation(call, done.texts, rounds=int(done.rounds)))

    def read(self, tokens: Prompts, length: int, **others: Any) -> Generation:
        """Prefills a cache with prompts without generating, for several calls of ``generate(..., after=)`` to share.

        Args:
            tokens: as for ``generate``.
            length: cache length in tokens, including all later prompts and texts.
            **others: further inputs of the model.
        """
        call = self._begin(self.read, tokens, 1, others, length=length)
        first = self._generation(call, call.state)
        nothing = first.tokens[:, :0]
        return replace(first, tokens=nothing, lengths=0 * first.lengths, last=nothing, source=self._source)

    def feeds(self, tokens: Prompts, **others: Any) -> dict[str, Any]:
        """The inputs of ``model`` for prompts of equal length: a mask of ones, positions from 0, and empty caches.

        With them ``model`` is called like any other: for the logits of all tokens, inner values, and the models of
        ``cut`` and ``replace``.

        Args:
            tokens: as for ``generate``.
            **others: further inputs of the model, or others than these.

        Raises:
            InputError: a prompt is empty or outside the vocabulary, they differ in length, or the model takes
                embeddings.

        >>> import onnx2jax
        >>> counting = onnx2jax.decoder(onnx2jax.demo_decoder())
        >>> logits, *_ = counting.model(counting.feeds(["one two ", "six ten "]))
        >>> logits.shape
        (2, 8, 128)
        """
        prompts = tokens if conversations(tokens) is None else self.encode(tokens)
        rows = prompt_rows(prompts, None, self.vocabulary)
        if len(lengths := sorted({len(row) for row in rows})) > 1:
            raise InputShapeError(f"prompts of {lengths} tokens: feeds has no padding, so their lengths must be equal")
        if (read := self.caches.roles.get("tokens")) is None:
            raise InputNameError(
                f"the decoder takes {self.caches.roles['embeddings'].name!r} rather than tokens: pass all inputs to "
                "decoder.model by name"
            )
        return complete_feeds(self.caches, {read.name: np.stack(rows).astype(dtype_of(read)), **others})

    @cached_property
    def _structure(self) -> DecoderStructure:
        return DecoderStructure(self)

    def __getstate__(self) -> dict[str, Any]:
        kept = {n: v for n, v in vars(self).items() if n not in ("weights", "_structure")}
        return kept | {"_programs": Programs(self)}  # compiled programs are not pickled

    def __repr__(self) -> str:
        graph, weights = self.model.graph, list(parameters(self.model.graph).values())
        caches = Counter(self.kinds.values())
        lengths = [] if self.context is None else [f"{self.context:,} tokens"]
        lengths += [] if self.fixed_length is None else [f"caches of {self.fixed_length:,} fixed by the file"]
        rows = {
            "parameters": f"{sum(v.size for v in weights):,}, {sum(v.nbytes for v in weights):,} bytes",
            "vocabulary": "unknown" if self.vocabulary is None else f"{self.vocabulary:,}",
            "context": ", ".join(lengths) or "not limited by the file",
            "caches": ", ".join(f"{n} {kind}" for kind, n in caches.items()),
            "inputs": ", ".join(self.others),
            "stop": f"{list(map(list, self.stop))}, pad {self.pad}",
            "text": "token ids only" if self.tokenizer is None else str(self.tokenizer),
        }
        return "\n".join([f"Decoder of {graph.name!r}", *(f"  {what}: {text}" for what, text in rows.items() if text)])


OF_VALUES: Final = frozenset(
    (
        *("model", "first", "embedding", "weights", "_prefill_model", "_full_cache_model", "_in_place_model"),
        *("_programs", "_verified", "_failed_layouts", "_structure"),
    )
)
"""Attributes of a decoder that depend on the values of its parameters."""


class DecoderStructure:
    """The static part of a decoder as a pytree: decoders that differ in parameter values alone have equal ones.

    The leaves are the parameters by name, as in ``params``.

    Attributes:
        names: the names of the leaves, in order.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._models = {prefix: (tuple(m.types), jax.tree.structure(m)) for prefix, m in decoder._parts.items()}
        self.names: tuple[str, ...] = tuple(prefix + n for prefix, names in decoder._names.items() for n in names)
        self._embedding = None if decoder.embedding is None else decoder.embedding.over(None)
        self._attributes = {n: v for n, v in vars(decoder).items() if n not in OF_VALUES}
        function = None if self._embedding is None else self._embedding.function
        settings = (self._attributes[n] for n in ("stop", "pad", "context", "tokenizer"))
        self._key = (*((p, *pair) for p, pair in self._models.items()), self.names, function, *settings)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DecoderStructure) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self.names)

    def __repr__(self) -> str:
        return f"{len(self.names)} parameters"

    def leaves(self, decoder: Decoder) -> list[Any]:
        """The parameters of a decoder of this structure, on their devices."""
        values: dict[str, Any] = {}
        for prefix, part in decoder._parts.items():
            leaves, _ = part._flat  # whatever they are: jax.tree.leaves would look into them
            values |= {prefix + n: v for n, v in zip(self._models[prefix][0], leaves, strict=True)}
        return [values[n] for n in self.names]

    def decoder(self, leaves: Iterable[Any]) -> Decoder:
        """The decoder of this structure with these leaves."""
        values = dict(zip(self.names, leaves, strict=True))
        models = {}
        for prefix, (names, structure) in self._models.items():
            leaves = [values[prefix + n] if prefix + n in values else values[n] for n in names]
            models[prefix] = jax.tree.unflatten(structure, leaves)
        new = object.__new__(Decoder)
        vars(new).update(self._attributes, _structure=self)
        new.model, new.first = models[""], models.get(FIRST, models[""])
        new.embedding = None if self._embedding is None else self._embedding.over(models.get(PREFIX))
        new._programs, new._verified, new._failed_layouts = Programs(new), set(), set()
        return new


def _with_keys(decoder: Decoder) -> tuple[list[tuple[DictKey, Any]], DecoderStructure]:
    structure = decoder._structure
    return list(zip(map(DictKey, structure.names), structure.leaves(decoder), strict=True)), structure


def _flat(decoder: Decoder) -> tuple[list[Any], DecoderStructure]:
    return decoder._structure.leaves(decoder), decoder._structure


# JAX builds decoders from any leaves, as it builds models: nothing is checked before a call.
jax.tree_util.register_pytree_with_keys(Decoder, _with_keys, lambda structure, leaves: structure.decoder(leaves), _flat)
for _name, _method in getmembers(Decoder, isfunction):
    if not _name.startswith("_"):  # an error of Python names the class that a user knows, not the one it inherits from
        _method.__module__, _method.__qualname__ = __name__, f"{Decoder.__name__}.{_name}"
