"""Convert the bundled model, classify sixteen digits, and differentiate: ``python -m onnx2jax.demo``."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from . import cli, compat
from .cli.terminal import timed
from .data import demo_model, demo_samples
from .model.convert import convert
from .progress import stage

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


class Samples(NamedTuple):
    """Test images, their labels, and onnxruntime's logits."""

    images: np.ndarray
    labels: np.ndarray
    logits: np.ndarray


class Timings(NamedTuple):
    """Seconds of each step from the file to results."""

    convert: float
    trace: float
    compile: float
    steady: float
    """Median of a hundred calls with the full batch."""


class Findings(NamedTuple):
    """The results of the demo."""

    samples: Samples
    probabilities: np.ndarray
    saliency: np.ndarray
    """d(score of the predicted digit) / d(pixel), in the shape of the images."""
    timings: Timings
    reference_difference: float
    vmap_difference: float
    gradient: float
    finite_difference: float

    @property
    def predictions(self) -> np.ndarray:
        """The most probable digit of each image."""
        return self.probabilities.argmax(-1)

    @property
    def right(self) -> int:
        """How many predictions are the labels."""
        return int((self.predictions == self.samples.labels).sum())


@stage("converting, compiling and differentiating")
def compute() -> Findings:
    """Compute the demo's results: outputs, times, a gradient with its check, and a vmap."""
    samples = Samples(**demo_samples())
    model, convert_s = timed(lambda: convert(demo_model()))
    traced, trace_s = timed(lambda: jax.jit(model.apply).trace(model.params, samples.images))
    compiled, compile_s = timed(lambda: traced.lower().compile())
    logits = np.asarray(compiled(model.params, samples.images))
    calls = [timed(lambda: jax.block_until_ready(compiled(model.params, samples.images)))[1] for _ in range(100)]

    def score(image: jax.Array, digit: int) -> jax.Array:
        return model.apply(model.params, image[None])[0, digit]

    predictions = logits.argmax(-1)
    saliency = np.asarray(jax.jit(jax.vmap(jax.grad(score)))(samples.images, predictions))
    one_by_one = jax.jit(jax.vmap(lambda image: model.apply(model.params, image[None])[0]))(samples.images)

    pixel = np.unravel_index(np.abs(saliency[0]).argmax(), saliency[0].shape)
    width = 1e-3
    nudged = np.repeat(samples.images[:1], len(samples.images), axis=0)  # reuses the compiled batch size
    nudged[(0, *pixel)] += width
    nudged[(1, *pixel)] -= width
    above, below = np.asarray(compiled(model.params, nudged))[:2, predictions[0]]
    return Findings(
        samples=samples,
        probabilities=np.asarray(jax.nn.softmax(logits)),
        saliency=saliency,
        timings=Timings(convert_s, trace_s, compile_s, statistics.median(calls)),
        reference_difference=float(np.abs(logits - samples.logits).max()),
        vmap_difference=float(np.abs(one_by_one - logits).max()),
        gradient=float(saliency[0][pixel]),
        finite_difference=float(above - below) / (2 * width),
    )


def draw(findings: Findings, path: Path) -> None:
    """Write a picture of each image with its prediction, and the pixels that support or oppose it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    axes = figure.subplots(4, 8)
    figure.suptitle("Handwritten digits: prediction and probability; red pixels support it, blue oppose it")
    for k, (digit, heat) in enumerate(zip(axes[:, 0::2].flat, axes[:, 1::2].flat, strict=True)):
        guess = findings.predictions[k]
        right = guess == findings.samples.labels[k]
        digit.imshow(findings.samples.images[k, 0], cmap="gray_r")
        digit.set_title(f"{guess}: {findings.probabilities[k, guess]:.1%}", color="black" if right else "crimson")
        bound = np.abs(findings.saliency[k]).max()
        heat.imshow(findings.saliency[k, 0], cmap="RdBu_r", vmin=-bound, vmax=bound)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_color("lightgray")
    figure.savefig(path, dpi=110)


def show(findings: Findings, console: Console) -> None:
    """Print the samples, then the numbers."""
    half = len(findings.samples.labels) // 2
    for row in (range(half), range(half, 2 * half)):
        console.print(_gallery(findings, row, colour=console.color_system is not None))
        console.print()
    console.print(_numbers(findings))


def _gallery(findings: Findings, row: range, colour: bool) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    table.add_row(*(_half_blocks(findings.samples.images[k, 0], colour) for k in row))
    captions = []
    for k in row:
        guess, truth = findings.predictions[k], findings.samples.labels[k]
        text = f"{guess}  {findings.probabilities[k, guess]:.1%}" + ("" if guess == truth else f" (is {truth})")
        captions.append(Text(text, style="green" if guess == truth else "bold red"))
    table.add_row(*captions)
    return table


def _half_blocks(image: np.ndarray, colour: bool) -> Text:
    """Two pixels per character: the upper in the foreground colour, the lower in the background colour."""
    from rich.text import Text

    def cell(top: float, bottom: float) -> tuple[str, str]:
        if not colour:
            return " ░▒▓█"[round(2 * (top + bottom))], ""
        over, under = int(255 * top), int(255 * bottom)
        return "▀", f"rgb({over},{over},{over}) on rgb({under},{under},{under})"

    lines = zip(image[0::2].tolist(), image[1::2].tolist(), strict=True)
    return Text("\n").join(Text.assemble(*map(cell, upper, lower)) for upper, lower in lines)


def _numbers(findings: Findings) -> Table:
    from rich.table import Table

    n, times = len(findings.samples.labels), findings.timings
    table = Table.grid(padding=(0, 2))
    for label, value in (
        ("right", f"{findings.right} of {n}"),
        *((step, f"{getattr(times, step) * 1e3:.0f} ms") for step in ("convert", "trace", "compile")),
        ("a call, steady", f"{times.steady * 1e6:.0f} µs for {n} images on {jax.default_backend()}"),
        ("against onnxruntime", f"largest difference of a logit {findings.reference_difference:.1e}"),
        ("jax.grad", f"{findings.gradient:.4f} at one pixel; by finite differences {findings.finite_difference:.4f}"),
        ("jax.vmap", f"largest difference to the batched call {findings.vmap_difference:.1e}"),
    ):
        table.add_row(f"[dim]{label}[/dim]", value)
    return table


def run(picture: Path) -> int:
    """Compute, print and draw; the exit status is 1 if an extra is missing."""
    try:
        import matplotlib  # noqa: F401
        from rich.console import Console
    except ImportError as error:
        print(f"The demo draws with matplotlib and rich ({error}): {compat.install('demo')}", file=sys.stderr)
        return 1
    findings = compute()
    show(findings, Console())
    draw(findings, picture)
    print(f"picture: {picture}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the demo with command-line arguments, as the command does."""
    return cli.main(["demo", *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
