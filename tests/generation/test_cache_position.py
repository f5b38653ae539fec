"""Encoder-decoders with ``cache_position`` but neither mask nor position_ids, as Whisper is exported."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

import onnx2jax
from onnx2jax import Decoder
from tests.generation import shared
from tests.generation.shared import P, Q
from tests.support.decoders import HEADS, HIDDEN, KV_HEADS, SIZE, File, Net, by_onnxruntime, cross

ROOM, SOURCE = 32, "encoder_hidden_states"
ENCODED = np.random.default_rng(3).normal(size=(2, 4, HIDDEN)).astype(np.float32)


def whisper(style: str, *, first: bool) -> File:
    """One file that declares the cache length ("fixed"), or one of two files whose caches grow ("grown")."""
    net = Net()
    at = net.give("cache_position", np.int64, "sequence_length")
    where = net("Unsqueeze", at, np.array([0]))
    if first or style == "fixed":
        net.give(SOURCE, np.float32, "batch_size", "encoder_sequence_length", HIDDEN)

    def joined(net: Net, i: int, part: str, new: str) -> str:
        if style == "grown" and first:
            return net("Identity", new, out=net.present(i, part))
        past, present = net.key_value(i, part, length=ROOM if style == "fixed" else "past_sequence_length")
        if style == "grown":
            return net("Concat", past, new, axis=2, out=present)
        places = net("Expand", net("Reshape", at, np.array([1, 1, -1, 1])), net("Shape", new))
        return net("ScatterElements", past, places, new, axis=2, out=present)

    def attend(net: Net, i: int, q: str, k: str, v: str) -> str:
        q, k, v = net.heads(q, HEADS), net.heads(k, KV_HEADS), net.heads(v, KV_HEADS)
        k, v = joined(net, i, "decoder.key", net.rotated(k, where)), joined(net, i, "decoder.value", v)
        return net.attention(net.rotated(q, where), k, v, net.added(net.causal("", net.extent(k, 2), places=at)))

    def in_every_call(net: Net, i: int, x: str, *_: str) -> str:
        q = net.heads(net.linear(net.norm(x, f"{i}.norm3"), f"{i}.cross.q", HIDDEN, HEADS * SIZE), HEADS)
        k, v = (net.linear(SOURCE, f"{i}.cross.{n}", HIDDEN, KV_HEADS * SIZE) for n in ("key", "value"))
        y = net.attention(q, net.heads(k, KV_HEADS), net.heads(v, KV_HEADS))
        return net("Add", x, net.linear(y, f"{i}.cross.o", HEADS * SIZE, HIDDEN))

    net.network(attend, in_every_call if style == "fixed" else cross(SOURCE, first=first))
    return net.file()


@cache
def decoder(style: str) -> Decoder:
    first = onnx2jax.convert(whisper(style, first=True).proto) if style == "grown" else None
    return onnx2jax.decoder(onnx2jax.convert(whisper(style, first=False).proto), prefill=first)


@cache
def without_caches(style: str, row: int, prompt: tuple[int, ...], count: int) -> list[int]:
    """Greedy tokens by onnxruntime, which runs the whole text through the prefill file for each."""
    file = whisper(style, first=True)
    run, text = by_onnxruntime(file), list(prompt)
    empty = {n: np.zeros(shape, dtype) for n, (_, shape, dtype) in file.caches.items()}
    for _ in range(count):
        feeds = {"input_ids": np.array([text]), "cache_position": np.arange(len(text)), SOURCE: ENCODED[row : row + 1]}
        text.append(int(np.argmax(run(feeds | empty)[0][0, len(text) - 1])))
    return text[len(prompt) :]


@pytest.mark.parametrize("style", ["fixed", "grown"])
def test_prompts_of_different_lengths_match_a_loop_without_caches(style: str) -> None:
    """Also when they are continued."""
    wanted = [without_caches(style, i, tuple(p), 8) for i, p in enumerate((P, Q))]
    assert len({*wanted[0], *wanted[1]}) > 4
    own = decoder(style)
    assert {"mask", "positions"}.isdisjoint(own.caches.roles) and "places" in own.caches.roles
    begun = own.generate([P, Q], 8, length=ROOM, encoder_hidden_states=ENCODED)
    assert begun.texts() == wanted
    more = own.generate([[7, 11]] * 2, 4, after=begun, encoder_hidden_states=ENCODED)
    assert more.texts() == [without_caches(style, i, (*p, *wanted[i], 7, 11), 4) for i, p in enumerate((P, Q))]


@pytest.mark.extended
def test_speculation_rolls_back_without_a_mask() -> None:
    """With prompts of different lengths."""
    own = decoder("grown")
    found = own.speculate([P, Q], 8, shared.decoder("group query, 4 bits"), count=2, length=ROOM, **{SOURCE: ENCODED})
    assert found.texts() == [without_caches("grown", i, tuple(p), 8) for i, p in enumerate((P, Q))]
    assert found.rounds is not None and found.rounds > 3
