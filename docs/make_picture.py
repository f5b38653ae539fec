"""Draw docs/picture.png: what goes in, what comes out, and what the demo's model makes of digits.

python -m docs.make_picture
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from onnx2jax import demo

PICTURE = Path(__file__).with_name("picture.png")
INK, BLUE, PALE = "#1a237e", "#3f51b5", "#eef1fb"
USES = ("jit", "grad", "vmap", "sharding", "export", "training")


def main() -> None:
    """Compute and draw."""
    found = demo.compute()
    figure = Figure(figsize=(12, 5), facecolor="white")
    _flow(figure.add_axes((0.01, 0.03, 0.55, 0.94)))
    _digits(figure, found)
    figure.savefig(PICTURE, dpi=110)


def _flow(axes: Any) -> None:
    axes.set(xlim=(0, 66), ylim=(0, 46))
    axes.axis("off")
    _box(axes, (1, 14, 17, 20), "model.onnx", "from PyTorch,\nTensorFlow,\nscikit-learn, ...", PALE, INK)
    _box(axes, (25, 14, 17, 20), "onnx2jax", "each node\nbecomes JAX;\nXLA compiles", BLUE, "white")
    for k, use in enumerate(USES):
        y = 40.5 - 7 * k
        _box(axes, (51, y - 2.5, 14, 5), use, "", PALE, INK)
        _arrow(axes, (42.5, 24), (50.6, y), BLUE)
    _arrow(axes, (18.5, 27), (24.6, 27), BLUE)
    axes.text(21.5, 28, "convert", ha="center", fontsize=10, color=INK)
    _arrow(axes, (24.6, 20), (18.5, 20), BLUE)
    axes.text(21.5, 17, "save", ha="center", fontsize=10, color=INK)
    what = "a pure function of weights and inputs,\non CPU, GPU and TPU"
    axes.text(21.5, 7, what, ha="center", fontsize=11, color=INK)


def _box(axes: Any, place: tuple[float, float, float, float], name: str, what: str, fill: str, ink: str) -> None:
    x, y, width, height = place
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0.3", facecolor=fill, edgecolor=BLUE))
    middle = y + height / 2 + (4 if what else 0)
    axes.text(x + width / 2, middle, name, ha="center", va="center", fontsize=14, weight="bold", color=ink)
    axes.text(x + width / 2, middle - 7, what, ha="center", va="center", fontsize=10.5, color=ink)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=14, color=colour, linewidth=1.5))


def _digits(figure: Figure, found: demo.Findings) -> None:
    title = "what the demo's model reads, and the pixels that speak for it"
    figure.text(0.785, 0.945, title, ha="center", fontsize=11, color=INK)
    for k in range(8):
        column, row = k % 4, k // 4
        left, bottom = 0.585 + 0.104 * column, 0.5 - 0.47 * row
        digit = figure.add_axes((left, bottom + 0.18, 0.09, 0.17))
        heat = figure.add_axes((left, bottom - 0.01, 0.09, 0.17))
        digit.imshow(found.samples.images[k, 0], cmap="gray_r")
        digit.set_title(str(found.predictions[k]), fontsize=12, color=INK, pad=3)
        bound = abs(found.saliency[k]).max()
        heat.imshow(found.saliency[k, 0], cmap="RdBu_r", vmin=-bound, vmax=bound)
        for axis in (digit, heat):
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_color("lightgray")


if __name__ == "__main__":
    main()
