"""Leaves of traced rows by masks and by an unrolled descent, beside the descent of NumPy's rows."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from onnx2jax import compat
from onnx2jax.ops.arrays import repeat
from onnx2jax.ops.ml import forests
from onnx2jax.ops.ml.forests import LEAF, MODES, Forest, Layout

SINGLE = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ")
ROWS = 50


def forest(
    seed: int, sizes: list[int], mode: str = "BRANCH_LEQ", dtype: Any = np.float32, missing: bool = False
) -> Forest:
    """Random trees of so many leaves; splits and inputs are small integers, so that many are equal."""
    rng = np.random.default_rng(seed)
    true: list[int] = []
    false: list[int] = []
    roots = []
    for size in sizes:
        roots.append(len(true))
        leaves = [len(true)]
        true.append(-1), false.append(-1)
        while len(leaves) < size:
            node = leaves.pop(rng.integers(len(leaves)))
            true[node], false[node] = len(true), len(true) + 1
            leaves += [len(true), len(true) + 1]
            true += [-1, -1]
            false += [-1, -1]
    n = len(true)
    children = [np.where(np.array(side) < 0, np.arange(n), side) for side in (true, false)]
    modes = np.where(np.array(true) < 0, LEAF, MODES.index(mode))
    features = np.where(modes == LEAF, 0, rng.integers(0, 4, n))
    splits = rng.integers(-2, 3, n).astype(dtype)
    tracks = rng.integers(0, 2, n).astype(bool) & missing
    return Forest(modes, features, splits, *children, tracks, np.array(roots))


def rows(seed: int, dtype: Any = np.float32) -> np.ndarray:
    x = np.random.default_rng(seed).integers(-3, 4, (ROWS, 4)).astype(dtype)
    x[::7, 1] = np.nan
    x[3, 2], x[4, 2] = np.inf, -np.inf
    return x


def reached(f: Forest, x: np.ndarray) -> np.ndarray:
    """The leaf of each row in each tree, by the specification: one comparison after the other."""
    compare = dict(zip(MODES, (operator.le, operator.lt, operator.ge, operator.gt, operator.eq), strict=False))
    found = np.zeros((len(x), len(f.roots)), int)
    for i, row in enumerate(x):
        for k, node in enumerate(f.roots):
            while f.modes[node] != LEAF:
                value = row[f.features[node]]
                passed = compare[MODES[f.modes[node]]](value, f.splits[node]) or (np.isnan(value) and f.missing[node])
                node = f.true[node] if passed else f.false[node]
            found[i, k] = node
    return found


def layout_of(f: Forest) -> tuple[Layout, np.ndarray]:
    layout, at, _ = forests._layout(f)
    return layout, at


FORESTS = {
    **{mode: forest(1, [5, 2, 9], mode) for mode in SINGLE},
    "float64": forest(2, [7, 7], dtype=np.float64),
    "missing": forest(3, [12, 3, 8], missing=True),
    "one leaf": forest(4, [1, 6, 1]),
    "32 leaves": forest(5, [32, 4]),
    "33 leaves": forest(6, [33, 1, 20]),
    "64 leaves": forest(7, [64], missing=True),
}


@pytest.mark.parametrize("name", FORESTS)
def test_masks_find_the_leaf_of_each_row(name: str) -> None:
    f = FORESTS[name]
    layout, at = layout_of(f)
    masks = forests._masks(layout)
    assert masks is not None
    x = rows(11, f.splits.dtype)
    with compat.enable_x64():
        found = jax.jit(partial(forests._leaves_by_masks, layout=layout, masks=masks))(x)
    assert found.dtype == np.uint32
    np.testing.assert_array_equal(at[np.asarray(found)], reached(f, x))


@pytest.mark.parametrize("steps", [repeat, forests._unrolled])
@pytest.mark.parametrize("name", ["BRANCH_LT", "missing", "64 leaves"])
def test_descents_find_the_leaf_of_each_row(name: str, steps: Any) -> None:
    f = FORESTS[name]
    layout, at = layout_of(f)
    x = rows(12, f.splits.dtype)
    with compat.enable_x64():
        found = jax.jit(partial(forests._descended, layout=layout, repeat=steps))(x)
    np.testing.assert_array_equal(at[np.asarray(found)], reached(f, x))


def test_deep_forests_are_not_unrolled() -> None:
    text = str(jax.make_jaxpr(lambda x: forests._unrolled(65, lambda _, v: v + 1, x))(1.0))
    assert "while" in text or "scan" in text
    assert "scan" not in str(jax.make_jaxpr(lambda x: forests._unrolled(64, lambda _, v: v + 1, x))(1.0))


def test_masks_serve_small_trees_alone() -> None:
    assert forests._masks(layout_of(forest(8, [65]))[0]) is None
    assert forests._masks(layout_of(forest(8, [1, 1]))[0]) is None, "nothing to compare"


@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize("sizes", [[8, 8, 8], [60, 3], [90, 3]])
def test_leaves_of_traced_rows(sizes: list[int], serial: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever form the platform and the release take, in 32-bit mode too, and for vmapped rows."""
    monkeypatch.setattr(compat, "has_serial_loops", lambda: serial)
    f = forest(9, sizes)
    layout, at = layout_of(f)
    x, wanted = rows(13), reached(f, rows(13))
    np.testing.assert_array_equal(at[forests._leaves(x, layout)], wanted)
    leaves = jax.vmap(lambda row: forests._leaves(row[None], layout)[0])
    with compat.enable_x64():
        for traced in jax.jit(lambda x: (forests._leaves(x, layout), leaves(x)))(x):
            np.testing.assert_array_equal(at[np.asarray(traced)], wanted)


def test_accelerators_bound_what_they_store(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, _ = layout_of(forest(10, [8, 8]))

    def branches(rows: int) -> str:
        with compat.enable_x64():
            return str(jax.make_jaxpr(lambda x: forests._leaves(x, layout))(np.zeros((rows, 4), np.float32)))

    monkeypatch.setattr(compat, "has_serial_loops", lambda: False)
    assert "reduce_and" in branches(10) and "platform_index" not in branches(10)
    monkeypatch.setattr(forests, "FOREST_CONDITIONS", 14 * 20)
    assert "platform_index" not in branches(20) and "platform_index" in branches(21)
