"""Generation with weights and caches sharded over eight devices matches one device."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import onnx2jax
from tests.support import decoders
from tests.support.decoders import File, by_hand, by_onnxruntime

PROMPTS = [[5, 17, 3, 40, 8], [9, 2, 31], [1, 2, 3, 4], [60, 7]]


@pytest.mark.parametrize("build", [decoders.group_query, decoders.appending], ids=["group query", "Concat"])
def test_texts_match_one_device(build: Callable[[], File]) -> None:
    file = build()
    run = by_onnxruntime(file)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    decoder = onnx2jax.decoder(onnx2jax.convert(file.proto, mesh=mesh, shardings="data+tensor"))
    texts = decoder.generate(PROMPTS, 6, stop=())
    assert texts.texts() == [by_hand(file, p, 6, run)[0] for p in PROMPTS]
    assert decoder.compilations <= 3
    assert {len(v.sharding.device_set) for v in texts.cache.values.values()} == {8}
