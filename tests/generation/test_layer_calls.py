"""Decoders whose layers are calls of one compiled program generate onnxruntime's tokens, as those of one program do."""

from __future__ import annotations

from typing import Any, Final

import jax
import numpy as np
import pytest

import onnx2jax
from onnx2jax.generation import graphs
from onnx2jax.runtime import sections
from onnx2jax.runtime.dispatch import BoundCall
from onnx2jax.runtime.sections import Sections
from tests.generation.shared import P, Q, decoder, file, greedy, searched
from tests.support import decoders
from tests.support.helpers import mesh

STYLE: Final = "group query, three layers"
BOTH = [P, Q]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Sections]:
    """The programs of sections that were run, in order."""
    found: list[Sections] = []
    original = Sections.bind

    def bind(self: Sections, *args: Any, **options: Any) -> BoundCall:
        bound = original(self, *args, **options)

        def call(leaves: Any) -> list[Any]:
            found.append(self)
            return bound.call(leaves)

        return bound._replace(call=call)

    monkeypatch.setattr(Sections, "bind", bind)
    return found


@pytest.fixture
def called() -> onnx2jax.Decoder:
    return decoder(STYLE, scan_layers="calls")


@pytest.mark.parametrize(
    "style",
    [
        STYLE,
        "group query, 4 bits, three layers",
        pytest.param("Concat, three layers", marks=pytest.mark.extended),
        pytest.param("group query, float16, three layers", marks=pytest.mark.extended),
        pytest.param("Concat, positions from extents in each of three layers", marks=pytest.mark.extended),
        pytest.param("Concat, three layers with a window", marks=pytest.mark.extended),
    ],
)
def test_texts_are_those_of_one_program(style: str, runs: list[Sections]) -> None:
    own = decoder(style, scan_layers="calls")
    assert own.generate(BOTH, 6).texts() == [greedy(style, p, 6) for p in BOTH]
    assert runs, "no program was cut"
    assert all(len({s.executable for s in each.sections}) < len(each.sections) for each in runs)


def test_long_caches(monkeypatch: pytest.MonkeyPatch, runs: list[Sections]) -> None:
    """Their zeros are computed in each call, but from no parameters."""
    monkeypatch.setattr(sections, "MOST_BETWEEN", 1 << 10)
    own = onnx2jax.decoder(file(STYLE).proto, scan_layers="calls")
    assert own.generate(P, 4, length=128).texts() == [greedy(STYLE, P, 4)]
    assert len({*map(id, runs)}) == 2  # of the prompt, and of a step


def test_stops_streams_and_samples_alike(called: onnx2jax.Decoder) -> None:
    expected = [greedy(STYLE, p, 8) for p in BOTH]
    stop = expected[0][3]
    stopped = called.generate(BOTH, 8, stop=stop)
    assert stopped.texts() == [text[: text.index(stop) + 1] if stop in text else text for text in expected]
    assert stopped.tokens.shape[1] == stopped.lengths.max()
    np.testing.assert_array_equal(np.stack(list(called.stream(BOTH, 8)), 1), expected)
    sampled = [d.generate(BOTH, 6, sampling="top_k", rng=4).texts() for d in (decoder(STYLE), called)]
    assert sampled[0] == sampled[1]
    assert called.generate(BOTH, 1).texts() == [text[:1] for text in expected]


def test_a_prefix_is_continued_twice(called: onnx2jax.Decoder) -> None:
    """A call that donated the prefix's cache would delete it."""
    prefix, more = called.read(BOTH, 64), [Q, P[:3]]
    wanted = [greedy(STYLE, [*p, *m], 5) for p, m in zip(BOTH, more, strict=True)]
    first, second = (called.generate(more, 5, after=prefix) for _ in range(2))
    assert first.texts() == second.texts() == wanted
    for _ in range(2):
        again = called.generate([[7, 8]] * 2, 3, after=first).texts()
        assert again[0] == greedy(STYLE, [*P, *Q, *wanted[0], 7, 8], 3)


def test_beams_use_one_program(called: onnx2jax.Decoder) -> None:
    found = called.beam_search(BOTH, 5, beams=2).tokens.tolist()
    assert found == [[list(text) for _, text in searched(STYLE, p, 5, 2)] for p in BOTH]


@pytest.mark.extended
def test_drafts_use_one_program(called: onnx2jax.Decoder) -> None:
    assert called.speculate(BOTH, 6, called).texts() == [greedy(STYLE, p, 6) for p in BOTH]


def test_two_files(monkeypatch: pytest.MonkeyPatch, runs: list[Sections]) -> None:
    """One for the prompt and one for steps, with caches of cross-attention that steps only read."""
    monkeypatch.setattr(graphs, "LEAST_BYTES", 1 << 10)
    later, first = (decoders.after_an_encoder(first=f, layers=2).file() for f in (False, True))
    hidden = {"encoder_hidden_states": np.random.default_rng(3).normal(size=(1, 4, decoders.HIDDEN)).astype(np.float32)}
    own = onnx2jax.decoder(later.proto, prefill=onnx2jax.convert(first.proto))
    begun = own.generate(P, 5, length=64, **hidden)
    assert begun.texts() == [decoders.by_hand(later, P, 5, first=first, **hidden)[0]]
    more = decoders.by_hand(later, [*P, *begun.texts()[0], *Q], 3, first=first, **hidden)[0]
    for _ in range(2):
        assert own.generate(Q, 3, after=begun, **hidden).texts() == [more]
    assert runs


def test_chosen_for_large_layers_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    proto = file(STYLE).proto
    assert onnx2jax.decoder(proto).model.settings.scan_layers is None
    monkeypatch.setattr(graphs, "LEAST_BYTES", 1 << 10)
    model = onnx2jax.convert(proto)
    chosen = onnx2jax.decoder(model)
    assert chosen.model.settings.scan_layers == "calls"
    assert model.settings.scan_layers is None
    assert chosen.model.weights is model.weights  # not twice in memory
    assert chosen.generate(P, 4).texts() == [greedy(STYLE, P, 4)]
    for options in ({"scan_layers": False}, {"optimize": False}, {"mesh": mesh(model=2), "shardings": "tensor"}):
        assert onnx2jax.decoder(proto, **options).model.settings.scan_layers in (None, False)


def test_two_decoders_and_another_configuration(called: onnx2jax.Decoder) -> None:
    """Programs are those of the decoder and of the configuration, though weights have equal types."""
    other = decoders.group_query(layers=3)
    embedding = next(w for w in other.proto.graph.initializer if w.dims[:1] == [decoders.VOCABULARY])
    embedding.raw_data = np.frombuffer(embedding.raw_data, np.float32)[::-1].tobytes()
    second = onnx2jax.decoder(other.proto, scan_layers="calls")
    expected = [[greedy(STYLE, p, 6) for p in BOTH], [decoders.by_hand(other, p, 6)[0] for p in BOTH]]
    assert [called.generate(BOTH, 6).texts(), second.generate(BOTH, 6).texts()] == expected
    compiled = second.compilations
    for _ in range(2):
        with jax.default_matmul_precision("float32"):
            assert second.generate(BOTH, 6).texts() == expected[1]
        assert second.compilations == 2 * compiled
        assert [called.generate(BOTH, 6).texts(), second.generate(BOTH, 6).texts()] == expected


def test_jax_may_check_each_operation(called: onnx2jax.Decoder, runs: list[Sections]) -> None:
    with jax.debug_nans(True):
        assert called.generate(BOTH, 4).texts() == [greedy(STYLE, p, 4) for p in BOTH]
    assert not runs


def test_weights_are_not_read_into_memory_twice() -> None:
    own = decoder("group query, 4 bits, three layers", scan_layers="calls")
    own.generate(BOTH, 6)
    assert "params" not in vars(own.model)
    assert "params" not in vars(own)
