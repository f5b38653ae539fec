"""A Decoder is a pytree: its leaves are ``params``, all else is static."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onnx2jax
from onnx2jax import Decoder
from onnx2jax.errors import InputShapeError, InputTypeError, ModelError, UnsupportedError
from tests.generation import families, shared
from tests.generation.shared import P
from tests.support import decoders

TOKENS = np.array([P])
ENCODED = np.random.default_rng(3).normal(size=(1, 4, decoders.HIDDEN)).astype(np.float32)


def two_files() -> Decoder:
    later, first = (onnx2jax.convert(decoders.after_an_encoder(first=f).file().proto) for f in (False, True))
    return onnx2jax.decoder(later, prefill=first.with_params({"0.q": first.params["0.q"] * 2}))


def with_embedding() -> Decoder:
    _, embedding, file = families.vision_language()
    return onnx2jax.decoder(onnx2jax.convert(file.proto), embed=onnx2jax.convert(embedding))


KINDS: dict[str, Callable[[], Decoder]] = {
    "4 bits": partial(shared.decoder, "group query, 4 bits"),
    "rewritten": partial(shared.decoder, "Concat, positions from extents"),
    "two files": two_files,
    "embedding": with_embedding,
}


@cache
def decoder(kind: str) -> Decoder:
    return KINDS[kind]()


def scaled(decoder: Decoder, factor: float) -> Decoder:
    return jax.tree.map(lambda v: factor * v if jnp.issubdtype(v.dtype, jnp.floating) else v, decoder)


def logits(decoder: Decoder, params: Any) -> Any:
    """The logits after the prompt, and those of a step."""
    others = {"encoder_hidden_states": ENCODED} if "encoder_hidden_states" in decoder.others else {}
    first, cache = decoder.prefill(params, decoder.empty_cache(1, 16), TOKENS, **others)
    return first, decoder.step(params, cache, TOKENS[:, -1], **others)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_is_an_argument_of_jit(kind: str) -> None:
    """As its params are, in one program for all decoders of a file."""
    own = decoder(kind)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(own)]
    assert paths == [f"['{n}']" for n in own.params]
    call, wanted = jax.jit(lambda each: logits(each, each.params)), jax.jit(partial(logits, own))
    for each in (own, scaled(own, 1.5)):
        for ours, want in zip(call(each), wanted(each.params), strict=True):
            np.testing.assert_allclose(ours, want, rtol=1e-4, atol=1e-4)
    assert call._cache_size() == 1


def test_a_decoder_that_jax_built_generates() -> None:
    """On the device of its leaves, and not by the first decoder's weights."""
    own = decoder("4 bits")
    changed = jax.device_put(scaled(own, -1.0), jax.devices()[1])
    wanted = np.argmax(jax.jit(partial(logits, own))(changed.params)[0])
    assert changed.generate(P, 1).texts() == [[wanted]] and changed.weights.device == jax.devices()[1]
    again = pickle.loads(pickle.dumps(changed))
    jax.tree.map(np.testing.assert_array_equal, again.params, changed.params)


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_trained_weights_are_saved(tmp_path: Path, dtype: str | None) -> None:
    source = onnx2jax.demo_decoder()
    trained = scaled(onnx2jax.decoder(source, dtype=dtype), 1.5)
    path = onnx2jax.save(trained, tmp_path / "trained.onnx")
    again = onnx2jax.decoder(path, dtype=dtype)
    jax.tree.map(np.testing.assert_array_equal, again.params, trained.params)
    assert any((v != again.params[n]).any() for n, v in onnx2jax.decoder(source, dtype=dtype).params.items())


def test_saving_decoders_of_merged_several_and_no_files(tmp_path: Path) -> None:
    """A file with a branch for the first call has both branches' weights; several files are saved one by one."""
    trained = scaled(onnx2jax.decoder(decoders.merged().proto), 1.5)
    again = onnx2jax.decoder(onnx2jax.save(trained, tmp_path / "merged.onnx"))
    jax.tree.map(np.testing.assert_array_equal, again.params, trained.params)
    for kind, parts in (("two files", ("model", "first")), ("embedding", ("model", "embedding.lookup"))):
        trained = scaled(decoder(kind), 1.5)
        with pytest.raises(ModelError, match="one by one") as error:
            onnx2jax.save(trained, tmp_path / "all.onnx")
        for part in parts:
            assert f"save(decoder.{part}, " in str(error.value)
            own = attrgetter(part)(trained)
            saved = onnx2jax.convert(onnx2jax.save(own, tmp_path / f"{part}.onnx"))
            jax.tree.map(np.testing.assert_array_equal, dict(saved.params), dict(own.params))
    model = onnx2jax.convert(onnx2jax.demo_decoder())
    changed = onnx2jax.decoder(model.replace({"logits": lambda v: 2 * v}))
    with pytest.raises(ModelError, match=r"save_checkpoint\(path, decoder\.params\)"):
        onnx2jax.save(changed, tmp_path / "changed.onnx")
    onnx2jax.training.save_checkpoint(tmp_path / "weights", changed.params)


def test_the_image_embedding_has_the_new_table() -> None:
    own = decoder("embedding")
    features = np.zeros((0, decoders.HIDDEN), np.float32)
    changed = scaled(own, 2.0)
    assert changed.embedding is not None
    fed = changed.embedding.embed_prompts(TOKENS, {"image_features": features})
    np.testing.assert_allclose(fed, 2 * np.asarray(own.params["embed/embedding"])[TOKENS], rtol=1e-6)


def test_generating_from_other_leaves_raises() -> None:
    own = decoder("4 bits")
    name = next(n for n, v in own.params.items() if v.dtype == np.float32)
    for leaf, error, message in (
        (lambda v: v.astype(jnp.bfloat16), InputTypeError, f"{name}.*is given as bfloat16"),
        (lambda _: None, InputTypeError, "takes an array, not None"),
        (lambda v: jnp.stack([v, v]), InputShapeError, r"must have shape .*, not \[2, "),
    ):
        built = jax.tree.map(leaf, own)
        with pytest.raises(error, match=message):
            built.generate(P, 3)
    for transform in (jax.jit, jax.grad):
        with pytest.raises(InputTypeError, match=r"decoder\.prefill and"):
            transform(lambda each: each.generate(P, 3).tokens.sum())(decoder("rewritten"))


def test_tables_chosen_by_the_text_length_are_constants() -> None:
    own = onnx2jax.decoder(onnx2jax.convert(families.decoder("phi3", "float32").proto))
    with pytest.raises(UnsupportedError, match=r"chooses between tables.*rather than one that is an argument of jit"):
        jax.jit(lambda each: logits(each, each.params))(own)
