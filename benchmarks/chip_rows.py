"""What docs/accelerators.md counts beyond inference of networks: training steps, decoders, real files and shardings."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from jax import lax

import onnx2jax
from onnx2jax import compat
from onnx2jax.model.devices import chips, hlo

from . import models
from .decoders import Size, write
from .networks import Make
from .networks.transformers import bert, gpt2

DECODER: Final = Size(32000, 2, 1024, 16, 4, 2816)
PROMPT, SLOTS, TOKENS = 512, 2048, 64


class Counted(NamedTuple):
    """What a program costs on one chip in a call."""

    bytes: int
    cycles: int
    temporary: int
    kernels: int
    flops: float
    seconds: float
    """Processor time of lowering and compiling."""


def counted(function: Any, arguments: Sequence[Any], chip: str, donate: Sequence[int] = ()) -> Counted:
    """The counts of a function compiled for a chip, from the types of its arguments."""
    sharding = jax.sharding.SingleDeviceSharding(chips.slice_of(chip).devices[0])

    def typed(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=sharding)

    start = time.process_time()
    compiled = jax.jit(function, donate_argnums=donate).lower(*jax.tree.map(typed, tuple(arguments))).compile()
    seconds = time.process_time() - start
    found = hlo.count(compiled.as_text() or "")
    memory: Any = compiled.memory_analysis()
    flops = compat.cost_analysis(compiled).get("flops", 0.0)
    return Counted(found.bytes, found.cycles, memory.temp_size_in_bytes, found.kernels, flops, seconds)


def training_step(make: Make, chip: str, batch: int) -> dict[str, Any]:
    """The gradient of half the sum of squares of a network's first output by all weights, ours and by hand."""
    with TemporaryDirectory() as folder:
        network = make(Path(folder), batch)
        model = onnx2jax.convert(network.path)
        feeds = {n: jnp.asarray(v) for n, v in network.feeds.items()}
        ours = _gradient(lambda p, x: model.apply(p, **x))
        assert network.by_hand is not None
        by_hand = _gradient(lambda p, x: network.by_hand(p, *x.values()))  # type: ignore[misc]
        return {
            "ours": counted(ours, (dict(model.params), feeds), chip)._asdict(),
            "by hand": counted(by_hand, (network.params, feeds), chip)._asdict(),
        }


def _gradient(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The gradient by the floating-point leaves of the first argument."""

    def gradient(params: Any, feeds: Any) -> Any:
        leaves, tree = jax.tree.flatten(params)
        floats = {i: v for i, v in enumerate(leaves) if jnp.issubdtype(v.dtype, jnp.floating)}

        def loss(floats: Any) -> Any:
            p = jax.tree.unflatten(tree, [floats.get(i, v) for i, v in enumerate(leaves)])
            return sum(jnp.sum(jnp.square(y)) / 2 for y in jax.tree.leaves(function(p, feeds))[:1])

        return jax.grad(loss)(floats)

    return gradient


DECODERS: Final[Mapping[str, dict[str, Any]]] = {
    "float32": {"bits": 0},
    "bfloat16": {"bits": 0, "dtype": "bfloat16"},
    "int4 weights": {"bits": 4, "dtype": "bfloat16"},
}
CALLS: Final = ("prefill", "step", "generate")


def decoder_call(form: Mapping[str, Any], call: str, chip: str, batch: int) -> dict[str, Any]:
    """A decoder's prefill of 512 tokens, one step over 2048 slots, or a loop of 64 greedy steps, in donated caches."""
    options = {n: v for n, v in form.items() if n != "bits"}
    with TemporaryDirectory() as folder:
        write(Path(folder), DECODER, form["bits"])
        decoder = onnx2jax.decoder(folder, **options)
        cache = jax.eval_shape(lambda: decoder.empty_cache(batch, SLOTS))
        params = dict(decoder.params)
        tokens = jax.ShapeDtypeStruct((batch, PROMPT) if call == "prefill" else (batch,), np.int32)

        def generate(params: Any, cache: Any, tokens: Any) -> Any:
            def advance(_: Any, state: Any) -> Any:
                cache, tokens = state
                logits, cache = decoder.step(params, cache, tokens)
                return cache, jnp.argmax(logits, -1).astype(tokens.dtype)

            return lax.fori_loop(0, TOKENS, advance, (cache, tokens))

        function = generate if call == "generate" else getattr(decoder, call)
        found = counted(function, (params, cache, tokens), chip, donate=(1,))
        held = sum(v.size * v.dtype.itemsize for v in jax.tree.leaves((params, cache.values)))
        return found._asdict() | {"held": held}


def file_call(path: Path, chip: str) -> dict[str, Any]:
    """A file's call with the inputs beside it, under a caller's jit."""
    model = onnx2jax.convert(path)
    feeds = models.inputs(path, model)
    return counted(lambda p, x: model.apply(p, **x), (dict(model.params), feeds), chip)._asdict()


def is_one_program(path: Path) -> bool:
    """Whether nothing of a file runs on the host or depends on values: a caller's jit takes it as it is."""
    model = onnx2jax.convert(path)
    try:
        jax.eval_shape(lambda p, x: model.apply(p, **x), dict(model.params), models.inputs(path, model))
    except Exception:  # whatever keeps it out of a program keeps it out of this table
        return False
    return True


SHARDED: Final[Mapping[str, Make]] = {
    "bert, 4 layers": partial(bert, layers=4, vocabulary=1024),
    "gpt2, 4 layers": partial(gpt2, layers=4, vocabulary=1024),
}
SLICES: Final = {"v5e": {4: "v5e:2x2", 8: "v5e:2x4"}, "h100": {4: "h100:4", 8: "h100:8"}}
PLANS: Final = ("tensor", "fsdp", "stages")


def sharded_step(make: Make, plan: str, number: int, chip: str) -> dict[str, Any]:
    """A network's call on several chips: per chip, its memory, bytes, cycles and collectives."""
    with TemporaryDirectory() as folder:
        network = make(Path(folder), 8)
        axis = {"tensor": "model", "fsdp": "data", "stages": "stage"}[plan]
        size = number if plan != "stages" else 4
        mesh = {axis: size} if size == number else {axis: size, "data": number // size}
        found = onnx2jax.cost(network.path, mesh, "data" if plan == "stages" else plan, chips=SLICES[chip][number])
        return {"found": str(found)}


def without_weights(path: Path) -> int:
    """Bytes of a file's initializers."""
    graph = onnx.load(path, load_external_data=False).graph
    return sum(len(t.raw_data) for t in graph.initializer)
