"""A user's program: the main call of README and of each guide, and the types that a type checker infers.

`make lint` checks it as `mypy --strict` would, a test by pyright, and another runs it in an empty folder. What only the
file decides (the results of a call, the elements of `params`) is `Any`: an array for most models, else a tuple, a
sequence or a map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np
import onnx.parser
import optax

import onnx2jax
from onnx2jax.data import demo_samples
from onnx2jax.errors import InputShapeError, OnnxError

IMAGES = np.ones((2, 1, 8, 8), np.float32)


def convert_and_save() -> None:
    model = assert_type(onnx2jax.convert(onnx2jax.demo_model(), bucket={"batch": [4]}), onnx2jax.Model)
    images = assert_type(demo_samples()["images"], np.ndarray)
    logits: jax.Array = model(images)
    (same,) = assert_type(model.run(None, {"image": images}), list[Any])
    np.testing.assert_array_equal(logits, same)

    def score(params: Mapping[str, Any]) -> jax.Array:
        total: jax.Array = model.apply(params, images).sum()
        return total

    gradient = jax.grad(score)(assert_type(model.floating_params, dict[str, Any]))
    assert_type(onnx2jax.save(model, "trained.onnx", params=gradient), Path)
    assert_type(model.save("same.onnx"), Path)
    assert_type(model.inputs[0].shape, tuple[int | str | None, ...] | None)
    assert_type(model.outputs[0].name, str)
    try:
        model(np.zeros((2, 3), np.float32))
    except InputShapeError as e:
        assert isinstance(e, OnnxError)


def transform() -> None:
    model = onnx2jax.convert(onnx2jax.demo_model())

    def score(model: onnx2jax.Model, images: np.ndarray) -> jax.Array:
        total: jax.Array = model(images).sum()
        return total

    value, slopes = jax.jit(jax.value_and_grad(score))(model, IMAGES)
    moved: onnx2jax.Model = jax.tree.map(lambda w, g: w + 0.01 * g, model, slopes)
    assert score(moved, IMAGES) > value
    assert_type(moved.params, dict[str, Any])
    optimizer = optax.sgd(0.01)

    @jax.jit
    def step(model: Any, state: Any) -> Any:  # to optax's types no class is a tree of arrays
        updates, state = optimizer.update(jax.grad(score)(model, IMAGES), state, model)
        return optax.apply_updates(model, updates), state

    start: Any = model
    tuned: onnx2jax.Model = step(start, optimizer.init(start))[0]
    path: Path = tuned.save("tuned.onnx")
    assert path.exists()
    images: jax.Array = jax.vmap(jax.grad(score, 1), (None, 0))(model, IMAGES[:, None])
    assert images.shape == (2, 1, 1, 8, 8)
    half = assert_type(model.with_options(dtype="bfloat16", outputs="compute"), onnx2jax.Model)
    assert_type("fc.bias" in half, bool)


def change_and_see() -> None:
    model = onnx2jax.convert(onnx2jax.demo_model())
    assert_type(model.cut(outputs=["flatten.out"]), onnx2jax.Model)
    softmax = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 22]> soft (float[n, 10] x) => (float[n, 10] p) { p = Softmax(x) }'
    )
    assert_type(onnx2jax.join(model, softmax, {"logits": "x"}), onnx2jax.Model)
    assert_type(model.replace({"relu1.out": lambda value: value * 0}), onnx2jax.Model)
    assert_type(model.with_params(model.params), onnx2jax.Model)
    assert_type(model.simplified(), onnx2jax.Model)
    assert_type(model.compile(IMAGES), onnx2jax.Model)
    assert_type(model.values(IMAGES, names=["relu*"]), dict[str, Any])
    assert_type(model.explain(), str)
    assert_type(model.explain_call(IMAGES), str)
    assert_type(model.draw("digits.html", inputs={"image": IMAGES}, dims={"batch": 2}), Path)
    assert_type(model.verify(against="onnxruntime").ok, bool)
    assert_type(onnx2jax.check(onnx2jax.demo_model()).ok, bool)
    assert_type(onnx2jax.cost(onnx2jax.demo_model(), {"data": 1}, compiled=False), onnx2jax.Cost)
    assert_type(model.export("digits"), Path)
    assert_type(onnx2jax.load_exported("digits"), onnx2jax.ExportedModel)


def loss(logits: jax.Array, batch: Mapping[str, Any]) -> jax.Array:
    mean: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return mean


def train() -> None:
    model = onnx2jax.convert(onnx2jax.demo_model())
    batch = {"image": IMAGES, "label": np.arange(2)}
    tuned = assert_type(
        onnx2jax.finetune(model, loss, optax.adam(1e-3), trainable="fc.*"), onnx2jax.training.FineTuning
    )
    for state, metrics in tuned.fit([batch]):
        assert_type(state, onnx2jax.training.FineTuningState)
        assert_type(metrics, dict[str, jax.Array])
    state, metrics = tuned.step(tuned.init(rng=0), batch)
    assert_type(tuned.evaluate(state, batch), dict[str, jax.Array])
    assert_type(tuned.to_model(state), onnx2jax.Model)
    assert_type(tuned.trainable, tuple[str, ...])
    with onnx2jax.training.Checkpoints("run") as checkpoints:
        checkpoints.save(1, state)
        assert_type(checkpoints.load(state), tuple[onnx2jax.training.FineTuningState, Any])
    trainer = onnx2jax.TrainingModel(onnx2jax.demo_training_model())
    own = assert_type(trainer.init(), onnx2jax.training.TrainingState)
    digits = {"image": np.zeros((32, 64), np.float32), "label": np.zeros(32, np.int64)}
    assert_type(trainer.step(own, digits), tuple[onnx2jax.training.TrainingState, dict[str, Any]])
    assert_type(trainer.to_model(), onnx2jax.Model)


def generate() -> None:
    decoder = assert_type(onnx2jax.decoder(onnx2jax.demo_decoder()), onnx2jax.Decoder)
    prompts = [list(b"nine "), list(b"two ")]
    generation = assert_type(
        decoder.generate(prompts, 4, sampling=onnx2jax.Sampling(top_k=2)), onnx2jax.generation.Generation
    )
    assert_type(generation.texts(), list[list[int]])
    assert_type(decoder.beam_search(prompts, 4, beams=2).texts(), list[list[int]])
    for tokens in decoder.stream(prompts, 2):
        assert_type(tokens, np.ndarray)
    cache = decoder.empty_cache(batch=1, length=16)
    logits, cache = decoder.prefill(decoder.params, cache, jnp.asarray([list(b"six ")]))
    logits, cache = decoder.step(decoder.params, cache, logits.argmax(-1))
    assert_type(logits, jax.Array)

    def total(decoder: onnx2jax.Decoder) -> jax.Array:
        first, _ = decoder.prefill(decoder.params, decoder.empty_cache(1, 8), np.array([[9, 2]]))
        return first.sum()

    moved: onnx2jax.Decoder = jax.tree.map(lambda w, g: w - g, decoder, jax.grad(total)(decoder))
    assert_type(moved.generate("nine ", 2), str)


def use_interfaces() -> None:
    session = onnx2jax.session.InferenceSession(onnx2jax.demo_model(), providers=["CPUExecutionProvider"])
    name = assert_type(session.get_inputs()[0].name, str)
    assert_type(session.run(None, {name: IMAGES}), list[Any])
    prepared = onnx2jax.backend.prepare(onnx2jax.demo_model(), "CPU")
    assert_type(prepared.run([IMAGES]), tuple[Any, ...])

    @onnx2jax.ops.op("SoftClip", domain="com.example.typed", replace=True)
    def soft_clip(x: jax.Array, limit: jax.Array | None = None, *, alpha: float = 1.0) -> jax.Array:
        return jnp.tanh(alpha * x) if limit is None else jnp.tanh(alpha * x) * limit

    assert_type(soft_clip(jnp.zeros(3), alpha=2.0), jax.Array)

    def double(x: jax.Array) -> jax.Array:
        return 2 * x

    assert_type(onnx2jax.portable(double)(jnp.zeros(3)), jax.Array)
    mesh = jax.make_mesh((jax.device_count(),), ("model",))
    spread = onnx2jax.convert(onnx2jax.demo_model(), mesh=mesh, shardings=onnx2jax.Plan("tensor"))
    assert_type(spread.explain_sharding(), str)


EXAMPLES: Sequence[Callable[[], None]] = (convert_and_save, transform, change_and_see, train, generate, use_interfaces)
