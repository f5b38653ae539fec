"""Windows that move over an image: extents, padding, and the parts of the image that they meet."""

from __future__ import annotations

import itertools
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from .arrays import check_room, is_known

WINDOW: dict[str, Any] = dict.fromkeys(("dilations", "kernel_shape", "pads", "strides"))
WINDOW["auto_pad"] = Literal["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID", ""]


class Window(NamedTuple):
    """ONNX's window attributes spelt out, one entry an axis; pads are pairs (before, after)."""

    kernel: tuple[Any, ...]
    strides: tuple[int, ...]
    pads: tuple[tuple[Any, Any], ...]
    dilations: tuple[int, ...]

    @property
    def spans(self):
        """How far the window reaches along each axis."""
        return [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]

    @property
    def unpadded(self):
        """The same over an image that is padded already."""
        return self._replace(pads=((0, 0),) * len(self.pads))

    def along(self, *extents):
        """(extent, ..., kernel, stride, pads, dilation) of every axis."""
        return zip(*extents, *self, strict=True)

    def by_axis(self):
        """For each axis the window along it, of one element along the others."""
        for i, chosen in enumerate(self.along()):
            yield Window(*zip(*(chosen if i == j else (1, 1, (0, 0), 1) for j in range(len(self.kernel))), strict=True))


def window_of(extents, kernel, strides=None, pads=None, dilations=None, auto_pad="NOTSET", kernel_shape=None):
    """The window of ``kernel`` elements, which an attribute kernel_shape must repeat, over an image of ``extents``."""
    kernel, rank = tuple(kernel), len(kernel)
    if kernel_shape is not None and tuple(kernel_shape) != kernel:
        raise ValueError(f"kernel_shape {tuple(kernel_shape)} differs from the weights' {kernel}")
    strides, dilations = (tuple(map(int, v)) if v is not None and len(v) else (1,) * rank for v in (strides, dilations))
    pads = tuple(map(int, pads)) if pads is not None and len(pads) else (0,) * (2 * rank)
    if not len(strides) == len(dilations) == len(pads) // 2 == len(extents) == rank:
        raise ValueError(f"kernel_shape {kernel}, {strides=}, {dilations=}, {pads=}: not for {len(extents)} axes")
    if any(isinstance(n, int) and n < 1 for n in kernel):
        raise ValueError(f"the kernel has the extents {kernel}, which must be positive")
    around = tuple(zip(pads[:rank], pads[rank:], strict=True)) if auto_pad != "VALID" else ((0, 0),) * rank
    window = Window(kernel, strides, around, dilations)
    if auto_pad.startswith("SAME"):
        axes = zip(extents, strides, window.spans, strict=True)
        totals = [max((-(-n // s) - 1) * s + span - n, 0) for n, s, span in axes]
        window = window._replace(pads=split_pads(totals, auto_pad == "SAME_UPPER"))
    check_room([n + sum(p) for n, p in zip(extents, window.pads, strict=True)], np.float32)
    return window


def split_pads(totals, more_at_end):
    """Padding shared between the two sides; what is odd goes to the end or to the beginning."""
    return tuple((t // 2, t - t // 2) if more_at_end else (t - t // 2, t // 2) for t in totals)


def count_blocks(extents, window):
    """How often a window fits along each axis."""
    rooms = [n + sum(p) - span for n, p, span in zip(extents, window.pads, window.spans, strict=True)]
    if any(room < 0 for room in rooms):  # of jax.export's symbols too, which then get a bound
        raise ValueError(f"a window {window} does not fit into an input of {tuple(extents)}")
    return [room // s + 1 for room, s in zip(rooms, window.strides, strict=True)]


def taps(x, window, fill=0, axis=2):
    """The part of ``x`` that each tap of the kernel meets, in row-major order of the taps.

    Spatial axes start at ``axis``: 2 when channels come first, 1 when they come last.
    """
    extents = x.shape[axis : axis + len(window.kernel)]
    spans = [(b - 1) * s + 1 for b, s in zip(count_blocks(extents, window), window.strides, strict=True)]
    x = padded(x, window, fill, axis)
    starts, ends, steps = [0] * x.ndim, list(x.shape), [1] * x.ndim
    some = slice(axis, axis + len(extents))
    steps[some] = window.strides
    for tap in itertools.product(*map(range, window.kernel)):
        starts[some] = [t * d for t, d in zip(tap, window.dilations, strict=True)]
        ends[some] = [a + n for a, n in zip(starts[some], spans, strict=True)]
        yield x[tuple(map(slice, starts, ends, steps))] if is_known(x) else lax.slice(x, starts, ends, steps)


def padded(x, window, fill=0, axis=2):
    """The image with the padding of a window around its spatial axes, the first of which is ``axis``."""
    if all(p == (0, 0) for p in window.pads):
        return x
    around = [(0, 0, 0)] * x.ndim
    around[axis : axis + len(window.pads)] = ((*p, 0) for p in window.pads)
    return pad_numpy(x, fill, around) if is_known(x) else lax.pad(x, jnp.array(fill, x.dtype), around)


def pad_numpy(x, fill, around):
    """lax.pad of a NumPy array; negative padding removes elements."""
    y = np.full([n + low + high for n, (low, high, _) in zip(x.shape, around, strict=True)], fill, x.dtype)
    inner = tuple(slice(max(low, 0), m - max(high, 0)) for m, (low, high, _) in zip(y.shape, around, strict=True))
    kept = tuple(slice(max(-low, 0), n - max(-high, 0)) for n, (low, high, _) in zip(x.shape, around, strict=True))
    y[inner] = x[kept]
    return y
