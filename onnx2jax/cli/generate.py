"""``onnx2jax generate model.onnx --prompt "..."``: streams a decoder's text."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from ..errors import UnsupportedError
from ..generation.decoder import Decoder
from ..generation.files import decoder, tokenizer
from ..generation.sampling import Sampling
from .terminal import add_command, add_computing, add_model, computing, loading, print_json, reading, whole, working

MOST = 128
"""Default maximum of new tokens, less where the model's context is shorter."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Ends a text whose last letter is not complete yet."""


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    generate = add_command(
        commands,
        "generate",
        _generate,
        "generate text with a decoder",
        example='generate folder --prompt "Once upon a time" --temperature 0.7',
        json="print the tokens, and the text where there is a tokenizer, as JSON at the end",
    )
    generate.set_defaults(refuse=generate.error)
    add_model(generate, "a decoder's file or folder")
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="needs tokenizer.json beside the model")
    prompt.add_argument("--prompt-ids", type=_ids, metavar="1,2,3", help="the prompt as tokens; prints tokens")
    generate.add_argument(
        "--max-new-tokens", type=int, metavar="N", help=f"(default: {MOST}, or what there is room for)"
    )
    generate.add_argument("--temperature", type=float, metavar="T", help="0 for the likeliest token, the default")
    generate.add_argument("--top-k", type=int, metavar="K", help="only the K likeliest tokens")
    generate.add_argument(
        "--top-p", type=float, metavar="P", help="only the likeliest tokens of probability P together"
    )
    generate.add_argument("--min-p", type=float, metavar="P", help="only tokens of P times the likeliest's probability")
    add_computing(generate)
    generate.add_argument("--cache-dir", type=Path, default=True, metavar="DIR", help="keep compiled programs there")
    generate.add_argument("--seed", type=whole, default=0, help="of what is drawn (default: %(default)s)")
    generate.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="ends the text, as do 1,2 with --prompt-ids; repeatable",
    )


def _ids(text: str) -> list[int]:
    parts = text.split(",")
    if not all(p.strip().isdecimal() for p in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of tokens such as 1,2,3")
    return [int(p) for p in parts]


def _generate(arguments: argparse.Namespace) -> int:
    if arguments.prompt_ids is not None:
        return _print_ids(arguments)
    try:
        words = tokenizer(arguments.model)
    except ImportError as error:
        raise UnsupportedError(f"{error}; or give tokens, --prompt-ids 1,2,3") from None
    with loading(arguments.model):
        model = decoder(arguments.model, **reading(arguments), cache_dir=arguments.cache_dir, **computing(arguments))
    found: list[int] = []
    tokens = _noted(_tokens(model, arguments, words.encode(arguments.prompt).ids), found)
    pieces = _pieces(words, tokens, arguments.stop)
    if arguments.json:
        print_json({"text": "".join(pieces), "tokens": found})
        return 0
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0


def _noted(tokens: Iterator[int], found: list[int]) -> Iterator[int]:
    """The tokens, each put into a list as it goes by."""
    for token in tokens:
        found.append(token)
        yield token


def _print_ids(arguments: argparse.Namespace) -> int:
    try:
        stop = [_ids(s) for s in arguments.stop]
    except argparse.ArgumentTypeError as error:
        arguments.refuse(f"argument --stop: {error}")
    with loading(arguments.model):
        model = decoder(arguments.model, **reading(arguments), cache_dir=arguments.cache_dir, **computing(arguments))
    tokens = _tokens(model, arguments, arguments.prompt_ids, stop)
    if arguments.json:
        print_json({"tokens": list(tokens)})
        return 0
    for i, token in enumerate(tokens):
        print(f" {token}" if i else token, end="", flush=True)
    print()
    return 0


def _tokens(
    model: Decoder, arguments: argparse.Namespace, prompt: Sequence[int], stop: Sequence[Sequence[int]] = ()
) -> Iterator[int]:
    """The tokens that come after a prompt."""
    count = arguments.max_new_tokens
    if count is None:
        room = model.fixed_length if model.context is None else model.context
        count = MOST if room is None else max(1, min(MOST, room - len(prompt)))
    limits = {n: v for n in ("temperature", "top_k", "top_p", "min_p") if (v := getattr(arguments, n)) is not None}
    sampling: Any = Sampling(**limits) if limits else "greedy"
    stream = model.stream(prompt, count, sampling=sampling, rng=arguments.seed, stop=[*model.stop, *stop])
    with working("compiling, and reading the prompt"):
        first = list(islice(stream, 1))
    for tokens in chain(first, stream):
        yield int(tokens[0])


def _pieces(words: Any, tokens: Iterator[int], stop: Sequence[str]) -> Iterator[str]:
    """The text of tokens as it grows, up to what ends it, which may lie across tokens."""
    held = max((len(s) - 1 for s in stop), default=0)
    ids: list[int] = []
    text, shown = "", 0
    for token in tokens:
        ids.append(token)
        text = words.decode(ids)
        if ends := [text.index(s) + len(s) for s in stop if s and s in text]:
            text = text[: min(ends)]
            break
        if not text.endswith(UNFINISHED) and len(text) - held > shown:
            yield text[shown : len(text) - held]
            shown = len(text) - held
    yield text[shown:]
