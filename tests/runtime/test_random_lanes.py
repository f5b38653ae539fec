"""Random networks from the folder of programs, in parts, and compiled in the background: bit for bit as without."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import onnx2jax
from onnx2jax.runtime import compile, cut, partition
from tests.model.test_random_networks import SHORT, assert_close
from tests.support.random_blocks import random_network

pytestmark = pytest.mark.usefixtures("one_cpu")


def assert_equal(ours: Any, theirs: Any, where: str) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), where, strict=True)


def check(seed: int, folder: Path) -> None:
    proto, net = random_network(seed)
    x = np.random.default_rng(seed).normal(size=(3, *net.shape("x")[1:])).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = onnx2jax.convert(proto)
        called, ran = plain(x), plain.run(None, {"x": x})
        stored, loaded = (onnx2jax.convert(proto, cache_dir=folder) for _ in range(2))
        first = stored.run(None, {"x": x})
        assert_equal(loaded.run(None, {"x": x}), first, f"seed {seed}, loaded, run")
        assert_equal(loaded(x), called, f"seed {seed}, loaded")
        background = onnx2jax.convert(proto, background_compile=True)
        for _ in range(2):
            background.run(None, {"x": x})
        background.compile({"x": x.shape})
        assert_equal(background.run(None, {"x": x}), ran, f"seed {seed}, background")
        results = [called]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cut, "MOST_COMPILED", -(-len(plain.graph.nodes) // 3))
            patch.setattr(partition, "MOST_FUSED", 1)
            for cores in (1, 3):
                patch.setattr(compile, "cores", lambda cores=cores: cores)
                parted = onnx2jax.convert(proto)
                assert len(parted._runtime.program.stages()) >= min(3, len(plain.graph.nodes))
                results.append(parted(x))
    assert_equal(results[1], results[2], f"seed {seed}, side by side")  # cut, a network is fused otherwise
    for ours, theirs in zip(jax.tree.leaves(results[1]), jax.tree.leaves(called), strict=True):
        assert_close(ours, theirs, net, f"seed {seed}, in parts")


def test_random_networks_in_every_lane(tmp_path: Path) -> None:
    for seed in SHORT[:2]:
        check(seed, tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize("block", range(3))
def test_more_random_networks_in_every_lane(block: int, tmp_path: Path) -> None:
    for seed in range(6 * block, 6 * (block + 1)):
        if seed not in SHORT[:2]:
            check(seed, tmp_path)
