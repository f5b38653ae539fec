"""NaN and infinities reach those results alone that read them: 0 * NaN is not 0 where a zero means "not read"."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
import onnx.reference
import pytest
from jax import lax

import onnx2jax
from tests.ops.test_microsoft import F32, I32
from tests.support import official
from tests.support.helpers import run_op
from tests.support.joined import joined
from tests.support.tiers import groups

RNG = np.random.default_rng(3)
NON_FINITE = np.nan, np.inf, -np.inf
Case = tuple[Callable[[Any], Any], np.ndarray, tuple[int, ...], int]
"""A function, its operand, a cell of it, and how far results around the cell may read it with weight 0."""


def spread(cases: Mapping[Any, Case]) -> list[tuple[Any, float]]:
    """The cases, and the values that in the cell change a result which does not depend on it."""
    calls = {}
    for name, (function, x, cell, reach) in cases.items():
        operands = np.stack([x] * (2 + len(NON_FINITE)))
        operands[1][tuple(slice(max(i - reach, 0), i + reach + 1) for i in cell)] += 1000
        for operand, value in zip(operands[2:], NON_FINITE, strict=True):
            operand[cell] = value
        calls[name] = (lambda xs, f=function: lax.map(f, xs)), (operands,)
    found = []
    for name, results in joined(calls).items():
        plain, changed, *others = np.asarray(results)
        independent = plain == changed
        assert independent.any()
        close = [np.isclose(y, plain, rtol=1e-5, atol=1e-6)[independent].all() for y in others]  # by another form
        found += [(name, v) for v, is_close in zip(NON_FINITE, close, strict=True) if not is_close]
    return found


def test_resize() -> None:
    """A neighbour of weight 0 is multiplied, as in other implementations, so a pixel reaches one further."""
    x = RNG.standard_normal((2, 11, 7)).astype(np.float32)
    modes: dict[str, dict[str, Any]] = {
        "linear": {"mode": "linear"},
        "aligned": {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
        "cubic": {"mode": "cubic", "exclude_outside": 1},
        "antialias": {"mode": "linear", "antialias": 1, "coordinate_transformation_mode": "asymmetric"},
    }

    def resized(sizes: tuple[int, int], mode: str) -> Callable[[Any], Any]:
        return lambda x: run_op("Resize", x, None, None, np.array([2, *sizes]), **modes[mode])

    names = product([(22, 14), (33, 8), (5, 3), (11, 14)], modes, [(1, 5, 3), (0, 10, 6)])
    assert not spread({name: (resized(*name[:2]), x, name[2], 2) for name in names})


IMAGES = RNG.standard_normal((2, 2, 8, 9)).astype(np.float32)
INNER, FIRST, LAST = (1, 1, 6, 5), (1, 1, 0, 0), (1, 1, 7, 8)
"""Cells; indices outside the image are clamped to the last two."""


def test_roi_align() -> None:
    rois = np.array([[0, 0, 3, 3], [2.1, 3.2, 8.3, 7.4], [-9, -9, -5, -5], [4, 4, 4, 4]] * 2, np.float32)

    def pooled(mode: str, ratio: int) -> Callable[[Any], Any]:
        attributes: dict[str, Any] = {"mode": mode, "output_height": 3, "output_width": 2, "sampling_ratio": ratio}
        return lambda x: run_op("RoiAlign", x, rois, np.array([1, 1, 1, 1, 0, 0, 0, 0]), **attributes)

    names = product(["avg", "max"], [0, 2], [INNER, FIRST])
    assert not spread({name: (pooled(*name[:2]), IMAGES, name[2], 1) for name in names})


@pytest.mark.parametrize("mode", ["avg", "max"])
def test_roi_align_of_wide_boxes_ends(mode: str) -> None:
    """The number of samples follows from the width of a box, which may be traced; no more are visited than matter."""
    widths = np.float32([2, 40, 1e9, np.inf, np.nan])
    rois = np.stack([np.zeros(5), np.zeros(5), widths, np.full(5, 2)], 1).astype(np.float32)
    attributes: dict[str, Any] = {"mode": mode, "output_height": 2, "output_width": 2, "sampling_ratio": 0}
    y = run_op("RoiAlign", np.ones((1, 1, 4, 4), np.float32), rois, np.zeros(5, np.int64), jit=True, **attributes)
    # of 20 samples in each half of a box of 40 the first five are inside, the fifth on the edge; the others are zeros
    wide = {"avg": [5 / 20, 0, 5 / 20, 0], "max": [1, 0, 1, 0]}[mode]
    got = np.asarray(y).reshape(5, 4)
    np.testing.assert_allclose(got[:2], [[1] * 4, wide], rtol=1e-6)
    assert (abs(got[2] - (0 if mode == "avg" else wide)) < 1e-6).all() and (got[3:] == 0).all()


def test_sampled_pixels() -> None:
    """Samples outside the image are zero, whatever the pixel is that is read in their place."""
    grid = RNG.uniform(-1.6, 1.6, (2, 6, 7, 2)).astype(np.float32)
    weights, offset = (RNG.uniform(-2, 2, s).astype(np.float32) for s in ((3, 2, 3, 3), (2, 18, 8, 9)))
    rois = np.array([[0.1, 0.2, 0.5, 0.9], [-1, -1, 2, 2]], np.float32)
    crops = rois, np.array([1, 1]), np.array([4, 5], np.int32)

    def sampled(mode: str, padding: str) -> Callable[[Any], Any]:
        return lambda x: run_op("GridSample", x, grid, mode=mode, padding_mode=padding)

    functions: dict[Any, Callable[[Any], Any]] = {
        "DeformConv": lambda x: run_op("DeformConv", x, weights, offset, pads=[1, 1, 1, 1]),
        "CropAndResize": lambda x: run_op("CropAndResize", x, *crops, domain="com.microsoft"),
        **{name: sampled(*name) for name in product(["linear", "nearest", "cubic"], ["zeros", "border"])},
    }
    names = product(functions, [INNER, FIRST, LAST])
    assert not spread({name: (functions[name[0]], IMAGES, name[1], 0) for name in names})


def real(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(F32)


def unread(
    name: str, inputs: list[Any], at: int, *cells: tuple[int, ...], tokens: slice = slice(None), **attributes: Any
) -> Iterator[Any]:
    """Cases of an operator of com.microsoft: its first output, for some tokens, as a function of one of its inputs."""
    options = {"domain": "com.microsoft", "n_outputs": 3 if "kv_num_heads" in attributes else 1, **attributes}

    def first(x: Any) -> Any:
        y = run_op(name, *inputs[:at], x, *inputs[at + 1 :], **options)
        return (y[0] if options["n_outputs"] > 1 else y)[..., tokens, :]

    yield from (((name, at, cell), (first, inputs[at], cell, 0)) for cell in cells)


HEADS: dict[str, Any] = {"num_heads": 2, "kv_num_heads": 1}


def attention_over_parts() -> Iterator[Any]:
    """Values that attention does not read: behind the end of a cache, outside a window, not selected."""
    qkv, cache = [real(2, 2, 8), real(2, 2, 4), real(2, 2, 4)], [real(2, 1, 6, 4) for _ in range(2)]
    step = [real(2, 1, 8), real(2, 1, 4), real(2, 1, 4)]
    buffers = [real(2, 2, 6, 4) for _ in range(2)]
    shared = [*(real(2, 1, 8) for _ in range(3)), None, None, None, *buffers, I32(3)]
    yield from unread("MultiHeadAttention", shared, 7, (1, 1, 4, 0), num_heads=2)
    long = (0, 0, 299, 1), (0, 0, 4, 1), (1, 0, 260, 0)  # more than are selected at once
    for new, rows, ends, cells in (
        (qkv, 8, [3, 5], [(0, 0, 7, 2)]),
        (step, 8, [3, 5], [(1, 0, 6, 1)]),
        (step, 300, [3, 259], long),
    ):
        grouped = [*new, *(real(2, 1, rows, 4) for _ in range(2)), I32(ends), I32(max(ends) + 1)]
        yield from unread("GroupQueryAttention", grouped, 4, *cells, **HEADS)
    paged = [real(3, 8), real(3, 4), real(3, 4), *(real(4, 2, 1, 4) for _ in range(2))]
    paged += [I32([0, 1, 3]), I32([0, 2]), I32([[1, -1], [0, 2]])]
    yield from unread("PagedAttention", paged, 4, (1, 1, 0, 2), (3, 0, 0, 0), **HEADS)
    chosen = I32([[0, 2], [3, -1], [2, -1], [-1, -1]])
    for new, rows in ((qkv, slice(None)), (step, slice(None, None, 2))):
        selected = [*new, *cache, None, None, chosen[rows], I32([2, 1, 1, 0])[rows], I32([3, 5]), I32([6])]
        yield from unread("DynamicSparseAttention", selected, 4, (0, 0, 1, 2), (1, 0, 3, 0), **HEADS)
    width, is_global = [real(8, 24), real(24)], I32([[1, 0, 0, 0, 0, 0]])
    far = [real(1, 6, 8), *width, np.zeros((1, 6), F32), *width, is_global]
    yield from unread("LongformerAttention", far, 0, (0, 5, 1), tokens=slice(1, 4), num_heads=2, window=1)


def test_attention_over_parts() -> None:
    """A weight of 0 is multiplied where ONNX's function body does; here values are not among the operands at all."""
    assert not spread(dict(attention_over_parts()))


def test_experts_that_are_not_chosen() -> None:
    """Many tokens are computed by all experts."""
    experts = [real(4, 3, 5), None, real(4, 5, 3)]
    probabilities = real(9, 4)
    silu: dict[str, Any] = {"activation_type": "silu", "k": 2}
    cases = (unread("MoE", [real(9, 5), probabilities, *experts], at, (1, 2, 1), **silu) for at in (2, 4))
    assert (probabilities.argmax(1) == 1).any()
    assert not spread({name: case for some in cases for name, case in some})


@pytest.mark.parametrize("jit", [False, True])
def test_kernels_of_support_vectors(jit: bool) -> None:
    """A vector at an infinite distance counts nothing, by either form; scores of two classes do not read a third."""
    x, vectors = real(8, 64), real(400, 64) / 10
    x[2, 5], x[3, 5], x[4, 5] = np.inf, -np.inf, 1e30
    rbf: dict[str, Any] = {"kernel_type": "RBF", "kernel_params": [0.5, 0, 0], "rho": [0.25], "n_supports": 400}
    coefficients = RNG.normal(size=400).tolist()
    lists = {"coefficients": coefficients, "support_vectors": vectors.ravel().tolist()}
    y = run_op("SVMRegressor", x, domain="ai.onnx.ml", jit=jit, **rbf, **lists)
    assert np.isfinite(y).all() and (np.asarray(y)[2:5] == 0.25).all()
    x, vectors = real(3, 4), real(6, 4)
    x[1, 1], vectors[:4, 1] = 1e20, 0
    cubes: dict[str, Any] = {"kernel_type": "POLY", "kernel_params": [1, 0, 3], "rho": [0.1, 0.2, 0.3]}
    cubes |= {"vectors_per_class": [2, 2, 2], "classlabels_ints": [0, 1, 2], "coefficients": coefficients[:12]}
    x = np.append(x, x[1:2], 0)
    x[3, 1] = 0  # what classes 0 and 1 see of it
    cubes["support_vectors"] = vectors.ravel().tolist()
    scores = np.asarray(run_op("SVMClassifier", x, domain="ai.onnx.ml", n_outputs=2, jit=jit, **cubes)[1])
    assert not np.isfinite(scores[1, 1:]).any()
    np.testing.assert_allclose(scores[1, 0], scores[3, 0], rtol=1e-6)


SKIPPED = "the reference pads with NaN, and skips it"
COMPARED = "the reference compares by Python's max and min, which skip NaN"
JUDGED: dict[str, str] = {
    **dict.fromkeys(["AveragePool", "LpPool", "MaxPool", "Resize", "Upsample"], SKIPPED),
    **dict.fromkeys(["RoiAlign", "ScatterElements", "ScatterND"], COMPARED),
    **dict.fromkeys(["Conv", "ConvTranspose"], "zeros between and around pixels are multiplied by weights"),
    **dict.fromkeys(["Bernoulli", "Dropout"], "random"),
    "DFT": "a transform carries NaN to all frequencies, and an FFT drops some of it",
    "Det": "LAPACK loses NaN",
    "GridSample": "whether a neighbour of weight 0 is read hangs by the rounding of its coordinate",
    "QuantizeLinear": "a zero point of NaN",
    "Scatter": "unknown to the reference",
    "Unique": "which of several NaN come first",
}
"""Why an operator may give more NaN and infinities than the reference does."""


def spoilt(case: Any) -> list[tuple[int, float]]:
    """Positions of inputs, and values in a cell of them, that a case spreads further than the reference does."""
    message, [(inputs, _), *_] = official.load(case)
    names = [v.name for v in official.free_inputs(message)]
    model, reference = onnx2jax.convert(message), onnx.reference.ReferenceEvaluator(message)
    found = []
    for (i, x), value in product(enumerate(inputs), NON_FINITE):
        if not isinstance(x, np.ndarray) or x.dtype.kind != "f" or not x.size:
            continue
        operand = x.copy()
        operand.reshape(-1)[RNG.integers(x.size)] = value
        feeds = dict(zip(names, [*inputs[:i], operand, *inputs[i + 1 :]], strict=True))
        with np.errstate(all="ignore"):
            try:
                wanted = reference.run(None, feeds)
                results = [*official.call(model, feeds), *official.run(model, feeds)]
            except (ArithmeticError, RuntimeError, ValueError):  # of counts and sizes; opset 8 of the reference
                continue
        for y, expected in zip(results, [*wanted, *wanted], strict=True):
            if isinstance(y, np.ndarray) and y.dtype.kind in "fc" and y.shape == expected.shape:
                found += [(i, value)] if (~np.isfinite(y) & np.isfinite(expected)).any() else []
    return found


FEW = ["test_clip", "test_cumsum_1d", "test_gather_0", "test_nllloss_NC", "test_rnn_seq_length", "test_tril"]
EVERY = [n for n, c in official.cases().items() if c.kind == "node" and "_expanded" not in n]


@pytest.mark.parametrize(
    "names", [FEW, *(pytest.param(g.values[0], marks=pytest.mark.extended) for g in groups(EVERY, 200))]
)
def test_official_cases_are_finite_where_the_reference_is(names: list[str]) -> None:
    found = {}
    for case in map(official.cases().__getitem__, names):
        operators = {node.op_type for node in case.model.graph.node}
        if len(operators) == 1 and not operators & JUDGED.keys():
            found[case.name] = spoilt(case)
    assert len(found) > len(names) / 3
    assert not {name: values for name, values in found.items() if values}
