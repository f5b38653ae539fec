"""Answers keywords of other libraries, and misspelt ones, with this one's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from inspect import signature
from typing import Any, Final

from ..errors import InputNameError, did_you_mean

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
