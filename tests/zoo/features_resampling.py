"""Functions of torch over images: sampling at points, resizing, shuffling pixels, padding."""

from __future__ import annotations

from typing import Any, Final

from .feature import F, Feature, cases, excused, f, of, torch
from .torch_exports import DYNAMO, SCRIPT

PADDINGS, ALIGNED = ("zeros", "border", "reflection"), (False, True)


def _samples(mode: str, aligned: tuple[bool, ...] = ALIGNED) -> Any:
    """Each padding and alignment."""
    return of(lambda x, grid: tuple(F.grid_sample(x, grid, mode, p, a) for p in PADDINGS for a in aligned))


def _resized(mode: str, *, aligned: tuple[bool | None, ...] = (None,), **options: Any) -> Any:
    """To a size, larger and smaller, and by a scale."""

    def call(x: Any) -> Any:
        n = x.ndim - 2
        targets = ({"size": (9, 7, 5)[:n]}, {"size": (3, 4, 2)[:n]}, {"scale_factor": (2.0, 1.5, 1.25)[:n]})
        return tuple(F.interpolate(x, mode=mode, align_corners=a, **t, **options) for a in aligned for t in targets)

    return of(call)


RESAMPLING: Final = (
    *(
        Feature(f"grid_sample, {mode}, each padding and alignment", _samples(mode), lambda n: [f(n, 2, 5, 6), _grid(n)])
        for mode in ("bilinear", "nearest")
    ),
    *(
        Feature(
            f"grid_sample, bicubic, each padding, align_corners={aligned}",
            _samples("bicubic", (aligned,)),
            lambda n: [f(n, 2, 5, 6), _grid(n)],
        )
        for aligned in ALIGNED
    ),
    Feature(
        "grid_sample of volumes",
        of(lambda x, grid: (F.grid_sample(x, grid, align_corners=False), F.grid_sample(x, grid, "nearest", "border"))),
        lambda n: [f(n, 2, 3, 4, 5), f(n, 2, 3, 2, 3) * 0.7],
        opset=20,
    ),
    Feature(
        "affine_grid and grid_sample",
        of(lambda x, t: tuple(F.grid_sample(x, F.affine_grid(t, x.shape, a), align_corners=a) for a in ALIGNED)),
        lambda n: [f(n, 2, 5, 6), torch.eye(2, 3) + 0.2 * f(n, 2, 3)],
        opset=20,
    ),
    Feature("interpolate, nearest", _resized("nearest"), lambda n: [f(n, 2, 5, 6)]),
    Feature("interpolate, nearest-exact", _resized("nearest-exact"), lambda n: [f(n, 2, 5, 6)], exporters=(DYNAMO,)),
    Feature("interpolate, linear", _resized("linear", aligned=ALIGNED), lambda n: [f(n, 2, 6)]),
    Feature("interpolate, bilinear", _resized("bilinear", aligned=ALIGNED), lambda n: [f(n, 2, 5, 6)]),
    Feature("interpolate, bicubic", _resized("bicubic", aligned=ALIGNED), lambda n: [f(n, 2, 5, 6)]),
    Feature("interpolate, trilinear", _resized("trilinear", aligned=ALIGNED), lambda n: [f(n, 2, 5, 6, 4)]),
    Feature(
        "interpolate to a fractional length",
        of(lambda x: F.interpolate(x, scale_factor=1.7, mode="linear", align_corners=False)),
        lambda n: [f(n, 2, 6)],
    ),
    Feature(
        "interpolate to a fractional length, align_corners",
        of(lambda x: F.interpolate(x, scale_factor=1.7, mode="linear", align_corners=True)),
        lambda n: [f(n, 2, 6)],
        known=excused(
            "ONNX's own tests of align_corners take n * scale for the length, torch and onnxruntime its floor",
            "outputs",
            "grad",
            by=(SCRIPT,),
        ),
    ),
    Feature("interpolate, area", of(lambda x: F.interpolate(x, (3, 2), mode="area")), lambda n: [f(n, 2, 6, 6)]),
    *(
        Feature(
            f"interpolate, {mode}, antialias",
            of(lambda x, mode=mode: F.interpolate(x, (3, 4), mode=mode, antialias=True)),
            lambda n: [f(n, 2, 9, 10)],
            exporters=(DYNAMO,),
        )
        for mode in ("bilinear", "bicubic")
    ),
    Feature(
        "interpolate by dynamic sizes",
        of(lambda x, y: F.interpolate(x, size=y.shape[2:], mode="bilinear") + y),
        lambda n: [f(1, 2, 5, 6), f(1, 2, 2 * n, 3 * n)],
    ),
    Feature(
        "pixel_shuffle, pixel_unshuffle",
        of(lambda x, y: (F.pixel_shuffle(x, 2), F.pixel_unshuffle(y, 3))),
        lambda n: [f(n, 8, 3, 4), f(n, 2, 6, 9)],
    ),
    Feature("channel_shuffle", of(lambda x: F.channel_shuffle(x, 4)), lambda n: [f(n, 8, 3)], exporters=(DYNAMO,)),
    Feature(
        "unfold and fold",
        of(
            lambda x: (
                F.unfold(x, (2, 3), padding=1, stride=2),
                F.fold(F.unfold(x, (2, 3), dilation=2, padding=1), (6, 7), (2, 3), dilation=2, padding=1),
                x.unfold(2, 3, 2),
            )
        ),
        lambda n: [f(n, 2, 6, 7)],
    ),
    Feature(
        "pad: constant, reflect, replicate, circular, negative",
        of(
            lambda x: (
                F.pad(x, (1, 2, 0, 3), value=0.5),
                F.pad(x, (2, 1, 1, 2), mode="reflect"),
                F.pad(x, (3, 0, 1, 4), mode="replicate"),
                F.pad(x, (1, 2, 2, 1), mode="circular"),
                F.pad(x, (-1, 2, 1, -2)),
            )
        ),
        lambda n: [f(n, 2, 5, 6)],
    ),
)


def _grid(n: int) -> Any:
    """Points in the image and somewhat beyond."""
    return f(n, 4, 3, 2) * 0.8


TABLES: Final = {"torch: resampling": RESAMPLING}
CASES: Final = cases(TABLES)
REFUSED: Final = {
    f"interpolate, antialias / {SCRIPT}": "aten::_upsample_bilinear2d_aa is not supported",
    f"interpolate, nearest-exact / {SCRIPT}": "aten::_upsample_nearest_exact2d is not supported",
    f"channel_shuffle / {SCRIPT}": "aten::channel_shuffle is not supported",
}
"""What has no line: what an exporter refuses to write, or writes as the specification forbids."""
