"""Decoders that take embeddings, of tokens (by a model or a function) and of images."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest

import onnx2jax
from onnx2jax import Decoder, compat
from onnx2jax.errors import InputNameError, UnsupportedError
from tests.generation.families import IMAGE, vision_language
from tests.support.decoders import HIDDEN, File, by_onnxruntime

VISION, EMBEDDING, FILE = vision_language()
PIXELS = np.random.default_rng(4).normal(size=(3, 12)).astype(np.float32)
PROMPT = [5, IMAGE, IMAGE, IMAGE, 3, 17, 8]
FILES = {"vision": VISION, "embedding": EMBEDDING, "decoder": FILE.proto}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the layout of onnxruntime-genai."""
    path = tmp_path_factory.mktemp("vision_language")
    for name, proto in FILES.items():
        onnx.save(proto, path / f"{name}.onnx")
    facts = {"model": {n: {"filename": f"{n}.onnx"} for n in FILES} | {"eos_token_id": 2}}
    (path / "genai_config.json").write_text(json.dumps(facts))
    return path


@pytest.fixture(scope="module")
def decoder(folder: Path) -> Iterator[Decoder]:
    yield onnx2jax.decoder(folder)


def wanted(prompt: list[int], features: np.ndarray, count: int) -> list[int]:
    """Greedy tokens by onnxruntime, with growing caches."""
    embed, run = by_onnxruntime(File(EMBEDDING, {})), by_onnxruntime(FILE)
    past = {n: np.zeros(shape, dtype) for n, (_, shape, dtype) in FILE.caches.items()}
    new, seen, tokens = prompt, 0, []
    for _ in range(count):
        given = features if not seen else features[:0]
        (x,) = embed({"input_ids": np.array([new]), "image_features": given})
        seen += len(new)
        logits, *present = run({"inputs_embeds": x, "attention_mask": np.ones((1, seen), np.int64), **past})
        past = dict(zip(past, present, strict=True))
        new = [int(logits[0, -1].argmax())]
        tokens += new
    return tokens


def test_images_and_tokens(folder: Path, decoder: Decoder) -> None:
    features = onnx2jax.convert(folder / "vision.onnx")(PIXELS)
    text = wanted(PROMPT, np.asarray(features), 10)
    assert (decoder.stop, decoder.others) == (((2,),), ("image_features",))
    texts = decoder.generate(PROMPT, 10, image_features=features, stop=())
    assert texts.texts() == [text]
    assert decoder.compilations <= 3
    more = decoder.generate([9, 31], 4, after=texts, stop=())
    assert more.texts() == [wanted([*PROMPT, *text, 9, 31], np.asarray(features), 4)]


def test_tokens_alone(decoder: Decoder) -> None:
    prompts = [[5, 3, 17, 8], [9, 2]]
    none = np.zeros((0, HIDDEN), np.float32)
    assert decoder.generate(prompts, 6, stop=()).texts() == [wanted(p, none, 6) for p in prompts]


def test_a_function_of_tokens(decoder: Decoder) -> None:
    """It is traced for all platforms: if it is jitted, JAX keeps the trace for other callers."""
    table, platforms = jnp.asarray(decoder.params["embed/embedding"]), set[str]()

    def embed(tokens: Any) -> Any:
        platforms.add(compat.platform())
        return table[tokens]

    own = onnx2jax.decoder(onnx2jax.convert(FILE.proto), embed=embed)
    assert own.generate([5, 3, 17], 5).texts() == [wanted([5, 3, 17], np.zeros((0, HIDDEN), np.float32), 5)]
    assert platforms == {""}


def test_prefill_takes_embeddings(decoder: Decoder) -> None:
    tokens = np.array([[5, 3, 17]])
    table: Any = decoder.params["embed/embedding"]
    bare = onnx2jax.decoder(onnx2jax.convert(FILE.proto))

    def run(own: Any, bare_own: Any) -> Any:
        found = bare.prefill(bare_own, bare.empty_cache(1, 16), np.asarray(table)[tokens])
        return found[0], decoder.prefill(own, decoder.empty_cache(1, 16), tokens)[0]

    logits, want = jax.jit(run)(decoder.params, bare.params)
    np.testing.assert_allclose(logits, want, atol=1e-6)
    with pytest.raises(
        InputNameError, match=r"takes 'inputs_embeds' rather than tokens: decoder\(\.\.\., embed=model\)"
    ):
        bare.generate([5, 3], 2)


def test_feeds_need_an_input_of_tokens(decoder: Decoder) -> None:
    with pytest.raises(InputNameError, match=r"takes 'inputs_embeds' rather than tokens: pass all inputs to"):
        decoder.feeds([5, 17])


def test_an_embedding_model_without_token_input_raises() -> None:
    with pytest.raises(UnsupportedError, match="the embedding model 'main' has no token input"):
        onnx2jax.decoder(onnx2jax.convert(FILE.proto), embed=onnx2jax.convert(VISION))
