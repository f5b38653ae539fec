"""Generation with weights and caches sharded over eight devices matches one device."""

from __future__ import annotations

import pytest

import onnx2jax
from tests.generation.shared import P, Q, file, greedy
from tests.support.helpers import mesh

PROMPTS = [P, Q, [1, 2, 3, 4], [60, 7]]


@pytest.mark.parametrize("style", ["group query", pytest.param("Concat", marks=pytest.mark.extended)])
def test_texts_match_one_device(style: str) -> None:
    devices = mesh(data=4, model=2)
    decoder = onnx2jax.decoder(file(style).proto, mesh=devices, shardings="data+tensor")
    texts = decoder.generate(PROMPTS, 6, stop=())
    assert texts.texts() == [greedy(style, p, 6) for p in PROMPTS]
    assert decoder.compilations <= 3
    assert {len(v.sharding.device_set) for v in texts.cache.values.values()} == {8}
