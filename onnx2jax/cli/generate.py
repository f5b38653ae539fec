"""``onnx2jax generate model.onnx --prompt "..."``: streams a decoder's text."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from ..generation.calls import MOST
from ..generation.decoder import Decoder
from ..generation.files import decoder
from ..generation.sampling import Sampling
from ..generation.text import Reader
from ..progress import stage
from .parser import Arguments, Parser, as_path, computing, loading, reading, whole
from .terminal import print_result


def add_generate(parser: Parser) -> None:
    """Add the options of the command."""
    parser.describe(
        'generate folder --prompt "Once upon a time" --temperature 0.7',
        json="print the tokens, and the text where there is a tokenizer, as JSON at the end",
        model="a decoder's file or folder",
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="needs tokenizer.json beside the model")
    prompt.add_argument("--prompt-ids", type=_ids, metavar="1,2,3", help="the prompt as tokens; prints tokens")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help=f"(default: {MOST}, or what there is room for)")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 for the likeliest token, the default")
    parser.add_argument("--top-k", type=int, metavar="K", help="only the K likeliest tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="only the likeliest tokens of probability P together")
    parser.add_argument("--min-p", type=float, metavar="P", help="only tokens of P times the likeliest's probability")
    parser.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1, words occur less often again"
    )
    parser.add_computing()
    parser.add_argument("--cache-dir", type=as_path, default=True, metavar="DIR", help="keep compiled programs there")
    parser.add_argument("--seed", type=whole, default=0, help="of what is drawn (default: %(default)s)")
    parser.add_repeatable("--stop", "TEXT", "ends the text, as do 1,2 with --prompt-ids")


def _ids(text: str) -> list[int]:
    parts = text.split(",")
    if not all(p.strip().isdecimal() for p in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of tokens such as 1,2,3")
    return [int(p) for p in parts]


def do_generate(arguments: Arguments) -> None:
    if arguments.prompt_ids is not None:
        _print_ids(arguments)
        return
    model = _decoder(arguments)
    try:
        prompt = model.encode(arguments.prompt)
    except ImportError as error:
        raise UnsupportedError(f"{error}; or give tokens, --prompt-ids 1,2,3") from None
    assert model.tokenizer is not None
    reader, tokens = Reader(model.tokenizer, [prompt], arguments.stop), list[int]()
    for token in _tokens(model, arguments, prompt):
        tokens.append(token)
        (piece,) = reader.add(np.array([token]), np.array([True]))
        if not arguments.json:
            print(piece, end="", flush=True)
        if reader.ended.all():
            break
    (rest,) = reader.rest()
    print_result(arguments, {"text": reader.texts[0], "tokens": tokens}, rest)


def _decoder(arguments: Arguments, **options: Any) -> Decoder:
    options |= {**reading(arguments), **computing(arguments), "cache_dir": arguments.cache_dir}
    with loading(arguments.model):
        return decoder(arguments.model, **options)


def _print_ids(arguments: Arguments) -> None:
    try:
        stop = [_ids(s) for s in arguments.stop]
    except argparse.ArgumentTypeError as error:
        arguments.parser.error(f"argument --stop: {error}")
    model = _decoder(arguments, tokenizer=False)
    tokens: list[int] = []
    for token in _tokens(model, arguments, arguments.prompt_ids, stop):
        if not arguments.json:
            print(f" {token}" if tokens else token, end="", flush=True)
        tokens.append(token)
    print_result(arguments, {"tokens": tokens}, "")


def _tokens(
    model: Decoder, arguments: Arguments, prompt: Sequence[int], stop: Sequence[Sequence[int]] = ()
) -> Iterator[int]:
    """The tokens that come after a prompt."""
    limits = {n: v for n in ("temperature", "top_k", "top_p", "min_p") if (v := getattr(arguments, n)) is not None}
    sampling: Any = Sampling(**limits) if limits else "greedy"
    stream = model.stream(
        prompt,
        arguments.max_new_tokens,
        sampling=sampling,
        rng=arguments.seed,
        stop=[*model.stop, *stop],
        repetition_penalty=arguments.repetition_penalty,
    )
    with stage("compiling, and reading the prompt"):
        first = list(islice(stream, 1))
    for tokens in chain(first, stream):
        yield int(tokens[0])
