"""What docs/accelerators.md counts: calls of networks, training steps, decoders, files and shardings."""

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
from jax import lax

import onnx2jax
from onnx2jax import compat
from onnx2jax.errors import KnownValueError, UnsupportedError
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


def counted(
    function: Any, arguments: Sequence[Any], chip: str, donate: Sequence[int] = (), *, compared: bool = False
) -> Counted:
    """The counts of a function compiled for a chip, from the types of its arguments.

    ``compared`` with another, both have the products of a GPU's library: without a GPU to tune on, XLA takes tiles of
    its own for one of them, and finds none for the other.
    """
    sharding = jax.sharding.SingleDeviceSharding(chips.slice_of(chip).devices[0])

    def typed(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=sharding)

    start = time.process_time()
    lowered = jax.jit(function, donate_argnums=donate).lower(*jax.tree.map(typed, tuple(arguments)))
    compiled = compat.compile_without_device(lowered, cublas=compared and _is_cuda(chip))
    seconds = time.process_time() - start
    found = hlo.count(compiled.as_text() or "")
    memory: Any = compiled.memory_analysis()
    flops = compat.cost_analysis(compiled).get("flops", 0.0)
    return Counted(found.bytes, found.cycles, memory.temp_size_in_bytes, found.kernels, flops, seconds)


def network_call(make: Make, chip: str, batch: int) -> dict[str, Any]:
    """A network's call: as it is, simplified, in bfloat16, and by hand."""
    with TemporaryDirectory() as folder:
        network = make(Path(folder), batch)
        model = onnx2jax.convert(network.path)
        feeds = {n: jnp.asarray(v) for n, v in network.feeds.items()}
        forms = {"ours": model, "simplified": model.simplified(merge_products=True)}
        found = {n: _ours(m, feeds, chip) for n, m in forms.items()}
        half = _in_bfloat16(network.path, feeds)
        by_library = (True, False) if _is_cuda(chip) else (True,)  # a GPU's tuner would choose
        found["bfloat16"] = min((_ours(*half, chip, compared=c) for c in by_library), key=lambda c: c["bytes"])
        if network.by_hand is not None:
            hand = counted(network.by_hand, (network.params, *feeds.values()), chip, compared=True)
            found["by hand"] = hand._asdict()
        return found


def _in_bfloat16(path: Path, feeds: Mapping[str, Any]) -> tuple[onnx2jax.Model, dict[str, Any]]:
    """The model computed in bfloat16 with its inputs, KV caches among inputs and outputs, as a Decoder keeps them."""
    outputs: Any = "compute" if any("past" in n for n in feeds) else "declared"
    model = onnx2jax.convert(path, dtype="bfloat16", outputs=outputs)
    return model, {n: v.astype("bfloat16") if v.dtype == "float32" else v for n, v in feeds.items()}


def _ours(model: onnx2jax.Model, feeds: Mapping[str, Any], chip: str, *, compared: bool = True) -> dict[str, Any]:
    return counted(lambda p, x: model.apply(p, **x), (dict(model.params), feeds), chip, compared=compared)._asdict()


def _is_cuda(chip: str) -> bool:
    return compat.lowering_platform(chips.slice_of(chip).devices[0]) == "cuda"


def training_step(make: Make, chip: str, batch: int) -> dict[str, Any]:
    """The gradient of half the sum of squares of a network's first output by all weights: as it is, simplified, and by
    hand."""
    with TemporaryDirectory() as folder:
        network = make(Path(folder), batch)
        model = onnx2jax.convert(network.path)
        feeds = {n: jnp.asarray(v) for n, v in network.feeds.items()}
        assert network.by_hand is not None
        by_hand = network.by_hand

        def count(function: Callable[[Any, Any], Any], params: Any) -> dict[str, Any]:
            return counted(gradient(function), (params, feeds), chip, compared=True)._asdict()

        simple = model.simplified(merge_products=True)
        return {
            "ours": count(lambda p, x: model.apply(p, **x), dict(model.params)),
            "simplified": count(lambda p, x: simple.apply(p, **x), dict(simple.params)),
            "by hand": count(lambda p, x: by_hand(p, *x.values()), network.params),
        }


def gradient(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The gradient by the floating-point leaves of the first argument but scalars, as the constants of GELU are in a
    file."""

    def gradient(params: Any, feeds: Any) -> Any:
        leaves, tree = jax.tree.flatten(params)
        floats = {i: v for i, v in enumerate(leaves) if v.ndim and jnp.issubdtype(v.dtype, jnp.floating)}

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
    """A file's call with the inputs beside it, under a caller's jit; empty if parts of it run on the host."""
    model = onnx2jax.convert(path)
    feeds = models.inputs(path, model)
    if any(np.asarray(v).dtype.kind in "OSTU" for v in feeds.values()):
        return {}
    try:
        return _ours(model, feeds, chip, compared=False)
    except (KnownValueError, UnsupportedError):  # shapes by value, strings
        return {}


SHARDED: Final[Mapping[str, Make]] = {
    "bert, 4 layers": partial(bert, layers=4, vocabulary=1024),
    "gpt2, 4 layers": partial(gpt2, layers=4, vocabulary=1024),
}
SLICES: Final = {"v5e": {4: "v5e:2x2", 8: "v5e:2x4"}, "h100": {4: "h100:4", 8: "h100:8"}}
PLANS: Final = {"tensor": "model", "fsdp": "data", "stages": "stage"}
"""Plans, and the axis of the mesh that each shards over."""


def sharded_call(make: Make, plan: str, number: int, chip: str) -> dict[str, Any]:
    """A network's call with eight rows on several chips, and what it costs on each."""
    with TemporaryDirectory() as folder:
        network = make(Path(folder), 8)
        found = onnx2jax.cost(
            network.path, {PLANS[plan]: number}, "" if plan == "stages" else plan, chips=SLICES[chip][number]
        )
    on, exchanges = found.on_chip, found.exchanges
    assert on is not None
    return {
        "weights": found.weight_bytes, "needed": on.needed, "bytes": on.moved, "cycles": on.cycles,
        "collectives": sum(e.number for e in exchanges), "sent": sum(e.bytes for e in exchanges),
    }  # fmt: skip
