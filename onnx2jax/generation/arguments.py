"""Validates a decoder's arguments: prompts, stop sequences, sampling, and keywords, other libraries' among them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from .. import compat
from ..errors import InputNameError, InputShapeError, InputTypeError, InputValueError, did_you_mean
from ..model.calls.arguments import as_key
from .sampling import BY_NAME, EMPTY, Choice, Sampling, UserFunction, as_arrays, greedy

Prompts = Any
"""Token ids: one prompt, a list of prompts (lengths may differ), or an array [batch, count]."""
One = str | list[dict[str, str]]
"""One text, or one conversation."""
Several = list[str] | tuple[str, ...]
_SAMPLING: Final = "sampling=onnx2jax.Sampling({}=...)"
_BEAMS: Final = "decoder.beam_search(prompt, {}=...)"
_PROCESSOR: Final = "logits_processors=[f], f(tokens_so_far, logits) returning logits"
_AFTER: Final = "after=, the result of an earlier generate"
GENERATING: Final = {
    "do_sample": "sampling='temperature', or 'greedy', the default",
    **{n: _SAMPLING.format(n) for n in ("temperature", "top_k", "top_p", "min_p")},
    **{n: _BEAMS.format(n) for n in ("beams", "length_penalty", "early_stopping")},
    "num_beams": _BEAMS.format("beams"),
    "num_return_sequences": "a list with the prompt several times, [prompt] * n",
    "eos_token_id": "stop=, tokens or strings",
    "stop_strings": "stop=",
    "stopping_criteria": "stop=, or leave the loop over decoder.stream(...)",
    "pad_token_id": "onnx2jax.decoder(..., pad=)",
    "max_length": "max_new_tokens=, without the prompt; length= is that of the cache",
    "max_tokens": "max_new_tokens=",
    "max_new_tokens": "length=, of the cache, with all later tokens",
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "bad_words_ids"), _PROCESSOR),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), f"repetition_penalty=, or {_PROCESSOR}"),
    "logits_processor": _PROCESSOR,
    "logits_processors": "decoder.generate(..., logits_processors=[f])",
    "logprobs": "decoder.generate(..., logprobs=True)",
    "rng": "decoder.generate(..., sampling=..., rng=)",
    **{n: f"decoder.generate(..., {n}=)" for n in ("repetition_penalty", "sampling", "after")},
    "output_scores": "logprobs=True",
    "output_logits": "logprobs=True, or a loop over decoder.step",
    "return_dict_in_generate": "tokens as the prompt, decoder.encode(text): the result is a Generation",
    "input_ids": "the first argument: decoder.generate(tokens)",
    **dict.fromkeys(("inputs", "prompt"), "the first argument: decoder.generate(prompt)"),
    "messages": "the first argument: decoder.generate(messages)",
    "past_key_values": _AFTER,
    "use_cache": "nothing: there is always a cache",
    "streamer": "decoder.stream(prompt), an iterator",
    "assistant_model": "decoder.speculate(prompt, draft=decoder)",
    **dict.fromkeys(("generator", "seed"), "rng=, a seed or a PRNG key"),
    "generation_config": "keywords; generation_config.json beside the file is read",
}
"""Keywords of Hugging Face's and OpenAI's generation -> what to use."""
LOADING: Final = {
    "eos_token_id": "stop=",
    "pad_token_id": "pad=",
    "max_length": "context=",
    "device_map": "mesh= and shardings=",
    "torch_dtype": "dtype=",
    **dict.fromkeys(("quantization_config", "load_in_4bit", "load_in_8bit"), "weights=; docs/guides/quantize.md"),
    "trust_remote_code": "nothing: a file of weights runs no code",
}
"""The same, for loading a model."""


def check_outside(arguments: Any) -> None:
    """Checks that no JAX transformation is being traced: generation compiles and runs programs of its own.

    Raises:
        InputTypeError: an argument is a tracer, or the call is inside a ``jit``.
    """
    if compat.in_a_program() or any(isinstance(v, jax.core.Tracer) for v in jax.tree.leaves(arguments)):
        raise InputTypeError(
            "generate cannot run inside jit, vmap or grad: call it outside; or write the loop with decoder.prefill and "
            "decoder.step, which are pure functions"
        )


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """The value as an int of at least ``least``.

    Raises:
        InputValueError: it is not a whole number, or below ``least``.

    >>> whole_number("beams", 4.0)
    4
    """
    number = value.item() if hasattr(value, "item") and np.size(value) == 1 else value
    if isinstance(number, bool) or not isinstance(number, int | float) or number != number // 1 or number < least:
        raise InputValueError(f"{name} is {value!r}; it is a whole number, {least} or more")
    return int(number)


def as_array(name: str, value: Any) -> np.ndarray:
    """An argument as a NumPy array.

    Raises:
        InputValueError: it has none, as nested lists that differ in length.
    """
    try:
        return np.asarray(value)
    except (TypeError, ValueError) as error:
        raise InputValueError(f"{name} is {value!r}, which is no array: {error}") from error


def device_arrays(inputs: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Copies of further inputs of a model on the device.

    Raises:
        InputTypeError: one is no array.
    """
    arrays = {n: v if hasattr(v, "dtype") else as_array(n, v) for n, v in inputs.items()}
    if wrong := [n for n, v in arrays.items() if v.dtype == object or v.dtype.kind in "SU"]:
        raise InputTypeError(f"input {wrong[0]!r} is {inputs[wrong[0]]!r}, not an array of numbers")
    return {n: jnp.array(v) for n, v in arrays.items()}


def prompt_rows(tokens: Prompts, mask: Any, vocabulary: int | None) -> list[np.ndarray]:
    """The prompts as int32 arrays without padding.

    Raises:
        InputError: there is none, or one is empty, not of integers, or outside the vocabulary; or the mask does not
            fit.
    """
    if not hasattr(tokens, "ndim") and not isinstance(tokens, Iterable):
        raise InputValueError(f"tokens is {tokens!r}: token ids of a prompt, [5, 17, 3], or of several, [[5, 17], [3]]")
    tokens = tokens if hasattr(tokens, "ndim") else list(tokens)
    if hasattr(tokens, "ndim") or not any(isinstance(t, Sequence) or np.ndim(t) for t in tokens):
        tokens = np.atleast_2d(np.asarray(tokens))
    rows = [as_array(f"prompt {i}", row) for i, row in enumerate(tokens)]
    if mask is not None:
        live = np.atleast_2d(as_array("attention_mask", mask))
        if live.dtype.kind not in "biuf":
            raise InputValueError(
                f"attention_mask is {mask!r}: 1 for tokens, 0 for padding, in the shape of the tokens"
            )
        live, lengths = live > 0, sorted({r.size for r in rows})
        if live.shape != (len(rows), *lengths):
            shape = (len(rows), *lengths) if len(lengths) == 1 else f"{len(rows)} lists of {lengths} tokens"
            raise InputShapeError(f"attention_mask {live.shape} does not match the tokens' shape {shape}")
        rows = [row[m] for row, m in zip(rows, live, strict=True)]
    for i, row in enumerate(rows):
        if row.shape == (0,):
            raise InputValueError(f"prompt {i} is empty; it needs one token id or more")
        if row.ndim != 1 or not row.size or row.dtype.kind not in "iu":
            raise InputValueError(f"prompt {i} is {row.dtype} {row.shape}; it needs one token id or more, as integers")
        if vocabulary is not None and not (row.min() >= 0 and row.max() < vocabulary):
            raise InputValueError(
                f"prompt {i} has tokens from {row.min()} to {row.max()}; tokens are 0 to {vocabulary - 1}"
            )
    if not rows:
        raise InputValueError("tokens is empty: give one prompt or more")
    return [row.astype(np.int32) for row in rows]


def one_text(tokens: Any, vocabulary: int | None) -> list[int]:
    """The tokens of one text, as a list.

    Raises:
        InputValueError: they are those of several texts, no whole numbers, or outside the vocabulary.

    >>> one_text([[3], [5]], 8)
    [3, 5]
    """
    try:
        ids = np.asarray(tokens)
    except ValueError:  # lists that differ in length
        ids = None
    if ids is None or sum(n > 1 for n in ids.shape) > 1:
        raise InputValueError(
            f"decode takes one text, and tokens has {len(tokens)}: [decoder.decode(t) for t in tokens]"
        )
    if ids.size and (ids.dtype.kind not in "iuf" or (ids % 1 != 0).any()):
        raise InputValueError(f"tokens is {tokens!r:.80}: token ids of one text, which are whole numbers")
    if ids.size and not (ids.min() >= 0 and (vocabulary is None or ids.max() < vocabulary)):
        valid = "0 or more" if vocabulary is None else f"0 to {vocabulary - 1}"
        raise InputValueError(f"decode is given tokens from {ids.min()} to {ids.max()}; tokens are {valid}")
    return [int(t) for t in ids.ravel()]


def stacked(
    rows: list[np.ndarray], batch: int | None = None, *, why: str = "prompts that continue texts are not padded"
) -> np.ndarray:
    """Prompts of equal length as an array int32[batch, count]; a single prompt is repeated for the batch.

    Raises:
        InputShapeError: they differ in length, which is unsupported because of ``why``; or their number is not
            ``batch``.
    """
    lengths = sorted({len(r) for r in rows})
    if len(lengths) > 1:
        raise InputShapeError(
            f"prompts of {lengths} tokens: {why}, so their lengths must be equal; or generate from each separately: "
            "[decoder.generate(prompt, max_new_tokens) for prompt in prompts]"
        )
    if batch is not None and len(rows) not in (1, batch):
        raise InputShapeError(f"{len(rows)} prompts cannot continue {batch} texts: give one, or one per text")
    return np.stack(rows if batch in (None, len(rows)) else rows * batch)


def stop_sequences(stop: Any) -> list[list[int]]:
    """Stop sequences, each as a list of tokens.

    >>> stop_sequences([2, [5, 6]])
    [[2], [5, 6]]
    """
    stop = stop.tolist() if hasattr(stop, "tolist") else stop
    several = [s.tolist() if hasattr(s, "tolist") else s for s in (stop if isinstance(stop, Sequence) else [stop])]
    sequences = [s if isinstance(s, Sequence) else [s] for s in several]
    if any(not s or not all(map(_is_token, s)) for s in sequences):
        raise InputValueError(f"stop is {stop!r}: a token, or several, each a token or a list of tokens, 0 or more")
    return [[int(t) for t in s] for s in sequences]


def _is_token(value: Any) -> bool:
    return isinstance(value, int | np.integer) and value is not True and bool(0 <= value <= np.iinfo(np.int32).max)


def as_choice(sampling: Any, rng: Any, processors: Any, penalty: Any, logprobs: Any) -> tuple[Choice, dict[str, Any]]:
    """How tokens are chosen, and its traced controls.

    Returns:
        The static part, and by name: ``key``; ``sampling`` for ``Sampling``; ``repetition_penalty`` if it is not 1.

    Raises:
        InputValueError: an argument has an invalid value.
        InputTypeError: a function takes other parameters.
    """
    controls: dict[str, Any] = {"key": jax.random.key(0) if rng is None else as_key(rng)}
    if isinstance(sampling, str):
        if sampling not in BY_NAME:
            raise InputValueError(f"sampling is {sampling!r}; the names are {', '.join(map(repr, BY_NAME))}")
        sampling = BY_NAME[sampling]
    if not callable(sampling) or isinstance(sampling, type):
        raise InputValueError(f"sampling is {sampling!r}: a name, Sampling(...), or a function of logits and a key")
    if isinstance(sampling, Sampling):
        controls["sampling"], sampling = as_arrays(sampling), greedy
    elif sampling is not greedy:
        sampling = UserFunction("sampling", "logits, key", sampling)
    processors = tuple(processors) if isinstance(processors, Iterable) else (processors,)
    if wrong := [p for p in processors if not callable(p) or isinstance(p, type)]:
        raise InputValueError(
            f"logits_processors has {wrong[0]!r}: a list of functions of the tokens so far and the logits that return "
            "logits"
        )
    processors = tuple(
        UserFunction(f"logits_processors[{i}]", "tokens_so_far, logits", p) for i, p in enumerate(processors)
    )
    value = as_array("repetition_penalty", penalty)
    if value.ndim or value.dtype.kind not in "iuf" or not 0 < value < np.inf:
        raise InputValueError(f"repetition_penalty is {penalty!r}; it is a number above 0, and 1 changes nothing")
    if value != 1:
        controls["repetition_penalty"] = value.astype(np.float32)
    if not isinstance(logprobs, bool | np.bool_):
        raise InputValueError(f"logprobs is {logprobs!r}, not True or False")
    return Choice(sampling, processors, bool(logprobs)), controls


def right_aligned(rows: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Rows of tokens as an array int32[batch, length], right-aligned, with ``EMPTY`` on the left.

    >>> right_aligned([[1, 2], [3]], 3).tolist()
    [[-1, 1, 2], [-1, -1, 3]]
    """
    return np.stack([np.pad(r, (length - len(r), 0), constant_values=EMPTY) for r in rows]).astype(np.int32)


def check_generating(
    names: Iterable[str], accepted: Collection[str], inputs: Iterable[str], function: Callable[..., Any]
) -> None:
    """Checks the keywords that a method of a decoder passes to the model's inputs.

    Args:
        names: of these keywords.
        accepted: names of inputs that may be passed.
        inputs: those of them that the decoder does not fill.
        function: the method.

    Raises:
        InputNameError: the model has no such input; the message names the keyword to use.
    """
    for name in names:
        if name in accepted and not name.startswith("\0"):
            continue
        if name in GENERATING:
            raise InputNameError(f"{function.__name__} has no keyword {name!r}: use {GENERATING[name]}")
        keywords = [p.name for p in signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        raise InputNameError(
            f"{function.__name__} has no keyword {name!r}, and the decoder no input {name!r}"
            f"{did_you_mean(name, [*keywords, *inputs, *GENERATING])}; keywords are {', '.join(keywords)}, and inputs "
            f"{', '.join(inputs) or 'none but the tokens'}"
        )


def check_loading(names: Iterable[str]) -> None:
    """Checks the keywords of ``decoder``.

    Raises:
        InputNameError: a keyword is another library's; the message names the one to use.
    """
    for name in names:
        if name in LOADING:
            raise InputNameError(f"decoder has no keyword {name!r}: use {LOADING[name]}")
