"""A training step of ``TrainingModel``, compared with the same network by hand in JAX, and in PyTorch if installed.

Medians of the times, and of the ratios within each round, time by hand / time here (above 1 is faster).

    python -m benchmarks.training
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import onnx

import onnx2jax
from benchmarks import zoo, zoo_by_hand
from benchmarks.harness import Comparison, compare

ROUNDS: Final = 41


def wide_mlp() -> onnx.ModelProto:
    """A network with layers of 64, 1024 and 10 for the digits, in batches of 512: a step dominated by computation."""
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
    """The digits' MLP in PyTorch; None if it is not installed."""
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


def ratio(compared: Comparison, name: str) -> str:
    """The time of ``name`` relative to a step of ours."""
    return f"{compared.paired('here', name).median:.2f}" if name in compared.timings else "-"


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
        compared = compare(works, rounds=ROUNDS, settle=jax.block_until_ready)
        here_ms, hand_ms = (f"{compared.timings[n].median * 1e3:.3f} ms" for n in ("here", "by hand"))
        ratios = " | ".join(ratio(compared, n) for n in ("by hand", "eager", "compiled"))
        print(f"| {name} | {size} | {here_ms} | {hand_ms} | {ratios} |")


if __name__ == "__main__":
    main()
