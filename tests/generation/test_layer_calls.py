"""Decoders whose layers are calls of one compiled program generate the tokens of one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import onnx2jax
from onnx2jax.generation import layer_calls
from onnx2jax.runtime import sections
from onnx2jax.runtime.sections import Sections
from tests.support import decoders
from tests.support.decoders import File
from tests.support.helpers import mesh

P, Q = [5, 17, 3, 40, 8], [9, 2, 31]

STYLES: dict[str, Callable[[], File]] = {
    "group query": lambda: decoders.group_query(layers=3),
    "group query, 4 bits": lambda: decoders.group_query(bits="symmetric", layers=3),
    "group query, float16": lambda: decoders.group_query(np.float16, layers=3),
    "Concat": lambda: decoders.appending(layers=3),
    "Concat, positions by extent": lambda: decoders.appending(positions=False, layers=3),
    "Concat, sliding window": lambda: decoders.appending(window=4, layers=3),
}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Sections]:
    """The programs of sections that were run, in order."""
    found: list[Sections] = []
    original = Sections.run

    def run(self: Sections, *args: Any) -> list[Any]:
        found.append(self)
        return original(self, *args)

    monkeypatch.setattr(Sections, "run", run)
    return found


def both(file: File, **options: Any) -> tuple[onnx2jax.Decoder, onnx2jax.Decoder]:
    """A decoder of one program, and one of calls."""
    plain, called = (onnx2jax.decoder(file.proto, scan_layers=how, **options) for how in (False, "calls"))
    return plain, called


@pytest.mark.parametrize("style", STYLES)
def test_texts_are_those_of_one_program(style: str, runs: list[Sections]) -> None:
    plain, called = both(STYLES[style]())
    assert called.generate([P, Q], 6).texts() == plain.generate([P, Q], 6).texts()
    assert runs, "no program was cut"
    assert all(len({*(id(s.compiled) for s in each.sections)}) < len(each.sections) for each in runs)


def test_long_caches(monkeypatch: pytest.MonkeyPatch, runs: list[Sections]) -> None:
    """Their zeros are computed in each call, but from no parameters."""
    monkeypatch.setattr(sections, "MOST_BETWEEN", 1 << 10)
    plain, called = both(decoders.group_query(layers=3))
    assert called.generate(P, 4, length=128).texts() == plain.generate(P, 4, length=128).texts()
    assert len({*map(id, runs)}) == 2  # of the prompt, and of a step


def test_stops_streams_and_samples_alike() -> None:
    plain, called = both(decoders.group_query(layers=3))
    expected = plain.generate([P, P[::-1]], 8)
    stop = int(expected.tokens[0, 3])
    for decoder in (plain, called):
        stopped = decoder.generate([P, P[::-1]], 8, stop=stop)
        assert stopped.texts()[0][-1] == stop
        assert stopped.tokens.shape[1] == stopped.lengths.max()
    np.testing.assert_array_equal(np.stack(list(called.stream([P, P[::-1]], 8)), 1), expected.tokens)
    sampled = [d.generate(P, 6, sampling="top_k", rng=4).texts() for d in (plain, called)]
    assert sampled[0] == sampled[1]
    assert called.generate(P, 1).texts() == [plain.generate(P, 4).texts()[0][:1]]


def test_a_prefix_is_continued_twice() -> None:
    """A call that donated the prefix's cache would delete it."""
    plain, called = both(decoders.group_query(layers=3))
    for decoder in (plain, called):
        prefix = decoder.read(P, 64)
        first, second = (decoder.generate(Q, 5, after=prefix) for _ in range(2))
        assert first.texts() == second.texts() == plain.generate(P + Q, 5, length=64).texts()
        again = [decoder.generate([7, 8], 3, after=first).texts() for _ in range(2)]
        assert again[0] == again[1]


def test_beams_and_drafts_use_one_program() -> None:
    plain, called = both(decoders.group_query(layers=3))
    assert called.beam_search(P, 5, beams=2).tokens.tolist() == plain.beam_search(P, 5, beams=2).tokens.tolist()
    assert called.speculate(P, 6, called).texts() == plain.generate(P, 6).texts()


def test_two_files(monkeypatch: pytest.MonkeyPatch, runs: list[Sections]) -> None:
    """One for the prompt and one for steps, with caches of cross-attention that steps only read."""
    monkeypatch.setattr(layer_calls, "LEAST_BYTES", 1 << 10)
    later, first = (decoders.after_an_encoder(first=f, layers=3).file().proto for f in (False, True))
    hidden = {"encoder_hidden_states": np.random.default_rng(3).normal(size=(1, 4, decoders.HIDDEN)).astype(np.float32)}
    texts = []
    for how in (False, None):
        decoder = onnx2jax.decoder(later, prefill=onnx2jax.convert(first, scan_layers=how), scan_layers=how)
        begun = decoder.generate(P, 5, length=64, **hidden)
        texts.append([begun.texts(), *(decoder.generate(Q, 3, after=begun, **hidden).texts() for _ in range(2))])
    assert runs
    assert texts[0] == texts[1]


def test_chosen_for_large_layers_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    file = decoders.group_query(layers=3)
    assert onnx2jax.decoder(file.proto).model.settings.scan_layers is None
    monkeypatch.setattr(layer_calls, "LEAST_BYTES", 1 << 10)
    model = onnx2jax.convert(file.proto)
    chosen = onnx2jax.decoder(model)
    assert chosen.model.settings.scan_layers == "calls"
    assert model.settings.scan_layers is None
    assert chosen.model.weights is model.weights  # not twice in memory
    assert chosen.generate(P, 4).texts() == onnx2jax.decoder(file.proto, scan_layers=False).generate(P, 4).texts()
    for options in ({"scan_layers": False}, {"optimize": False}, {"mesh": mesh(model=2), "shardings": "tensor"}):
        assert onnx2jax.decoder(file.proto, **options).model.settings.scan_layers in (None, False)


def test_two_decoders_and_another_configuration() -> None:
    """Programs are those of the decoder and of the configuration, though weights have equal types."""
    file, other = decoders.group_query(layers=3), decoders.group_query(layers=3)
    embedding = next(w for w in other.proto.graph.initializer if w.dims[:1] == [decoders.VOCABULARY])
    values = np.frombuffer(embedding.raw_data, np.float32)
    embedding.raw_data = values[::-1].tobytes()
    first, second = (onnx2jax.decoder(f.proto, scan_layers="calls") for f in (file, other))
    expected = [onnx2jax.decoder(f.proto, scan_layers=False).generate(P, 6).texts() for f in (file, other)]
    assert [first.generate(P, 6).texts(), second.generate(P, 6).texts()] == expected
    compiled = first.compilations
    with jax.default_matmul_precision("float32"):
        assert first.generate(P, 6).texts() == expected[0]
    assert first.compilations == 2 * compiled
    assert [first.generate(P, 6).texts(), second.generate(P, 6).texts()] == expected
    assert first.compilations == 2 * compiled


def test_jax_may_check_each_operation(runs: list[Sections]) -> None:
    decoder = onnx2jax.decoder(decoders.group_query(layers=2).proto, scan_layers="calls")
    expected = decoder.generate(P, 4).texts()
    del runs[:]
    with jax.debug_nans(True):
        assert decoder.generate(P, 4).texts() == expected
    assert not runs


def test_weights_are_not_read_into_memory_twice() -> None:
    decoder = onnx2jax.decoder(decoders.group_query(bits="symmetric", layers=3).proto, scan_layers="calls")
    decoder.generate(P, 3)
    assert "params" not in vars(decoder.model)
    assert "params" not in vars(decoder)
