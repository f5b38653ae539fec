"""A training step of ``TrainingModel`` beside the same network by hand in JAX, and in PyTorch where that is installed.

Paired in one run: warmed blocks of steps in random order; medians of the times, and of the ratios within each turn,
time by hand / time here (above 1 is faster).

    python -m benchmarks.training
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import onnx

import onnx2jax
from benchmarks import zoo, zoo_by_hand

ROUNDS: Final = 41
BLOCK: Final = 0.1
"""Seconds of steps between two looks at the clock, at least."""


def wide_mlp() -> onnx.ModelProto:
    """The digits' network of layers 64, 1024 and 10, for batches of 512: a step that is work."""
    return zoo.digits_mlp(width=1024)


def here(model: onnx.ModelProto, batch: zoo_by_hand.Batch) -> Callable[[], Any]:
    trainer = onnx2jax.TrainingModel(model, outputs=["loss"])
    trainer.initialize()
    return lambda: trainer.train_step(batch)["loss"]


def by_hand(model: onnx.ModelProto, plain: zoo_by_hand.Plain, batch: zoo_by_hand.Batch) -> Callable[[], Any]:
    trainer = onnx2jax.TrainingModel(model)
    trainer.initialize()
    params = jax.tree.map(jnp.array, trainer.state.variables)
    step = jax.jit(plain.step, donate_argnums=(0, 1))
    held = [params, plain.state(params)]

    def run() -> Any:
        held[0], held[1], loss = step(held[0], held[1], batch)
        return loss

    return run


def in_torch(batch: zoo_by_hand.Batch, width: int, compiled: bool) -> Callable[[], Any] | None:
    """The digits' MLP in PyTorch; None without it."""
    try:
        import torch
    except ImportError:
        return None
    layers = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))
    network: Any = torch.compile(layers) if compiled else layers
    adam = torch.optim.Adam(network.parameters(), lr=0.003)
    image, label = torch.from_numpy(batch["image"]), torch.from_numpy(batch["label"])

    def run() -> Any:
        adam.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(image / 16), label)
        loss.backward()
        adam.step()
        return loss.item()

    return run


def seconds(work: Callable[[], Any], steps: int) -> float:
    """Seconds a step takes, over a block of them."""
    start = time.perf_counter()
    for _ in range(steps):
        result = work()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / steps


def compare(works: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Seconds a step in each turn."""
    steps: dict[str, int] = {}
    for name, work in works.items():
        seconds(work, 20)
        steps[name] = max(5, int(BLOCK / seconds(work, 5)))
    taken: dict[str, list[float]] = {name: [] for name in works}
    order = random.Random(0)
    for _ in range(ROUNDS):
        for name in order.sample([*works], len(works)):
            seconds(works[name], steps[name] // 4)  # threads of the one before may still be spinning
            taken[name].append(seconds(works[name], steps[name]))
    return taken


def ratio(times: dict[str, list[float]], name: str) -> str:
    """The median over all turns of the time that ``name`` takes over the time here."""
    if name not in times:
        return "-"
    return f"{statistics.median(a / b for a, b in zip(times[name], times['here'], strict=True)):.2f}"


def main() -> None:
    print("| model | batch | here | by hand in JAX | ratio | PyTorch eager | torch.compile |")
    print("|---|---|---|---|---|---|---|")
    cases: list[tuple[str, onnx.ModelProto, zoo_by_hand.Plain, int, int]] = [
        ("digits_mlp", zoo.digits_mlp(), zoo_by_hand.PLAIN["digits_mlp"](), 128, 128),
        ("digits_mlp, width 1024", wide_mlp(), zoo_by_hand.PLAIN["digits_mlp"](), 512, 1024),
        ("digits_cnn", zoo.digits_cnn(), zoo_by_hand.PLAIN["digits_cnn"](), 128, 0),
    ]
    for name, model, plain, size, width in cases:
        shape, scale = ((64,), 1.0) if width else ((1, 8, 8), 1 / 16)
        batch = next(zoo_by_hand.digit_batches(shape, scale, size)(np.float32))
        works = {"here": here(model, batch), "by hand": by_hand(model, plain, batch)}
        for title, compiled in (("eager", False), ("compiled", True)):
            work = in_torch(batch, width, compiled) if width else None
            if work is not None:
                works[title] = work
        times = compare(works)
        here_ms, hand_ms = (f"{statistics.median(times[n]) * 1e3:.3f} ms" for n in ("here", "by hand"))
        ratios = " | ".join(ratio(times, n) for n in ("by hand", "eager", "compiled"))
        print(f"| {name} | {size} | {here_ms} | {hand_ms} | {ratios} |")


if __name__ == "__main__":
    main()
