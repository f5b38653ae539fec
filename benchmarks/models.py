"""Real models: files on disk with inputs, models of the onnx package and of other installed packages."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import numpy_helper

import onnx2jax

NOT_MODELS: Final = ("onnx", "onnx2jax", "onnxruntime", "skl2onnx")
"""Packages with .onnx files for tests."""


def found(paths: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    """Names and files: each path is a file, a folder with ``model.onnx``, or a folder of such folders."""
    for path in paths:
        if path.is_file():
            yield (path.stem if path.stem != "model" else path.parent.name), path
        else:
            for file in sorted(path.rglob("model.onnx")):
                yield file.parent.name, file


def shipped() -> Iterator[tuple[str, Path]]:
    """The demo's classifier, and the light networks in the onnx package (weights constant, shapes real)."""
    yield "digits (the demo's)", onnx2jax.demo_model()
    light = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    for path in sorted(light.glob("*.onnx")):
        yield path.stem, path


def in_packages() -> Iterator[tuple[str, Path]]:
    """Models in installed packages."""
    for package in importlib.metadata.distributions():
        name = package.metadata["Name"]
        for file in package.files or ():
            if file.suffix == ".onnx" and name not in NOT_MODELS:
                yield f"{name}: {file.stem}", Path(str(file.locate()))


def inputs(path: Path, model: onnx2jax.Model) -> dict[str, np.ndarray]:
    """The inputs next to a model's file, or random ones.

    These are ``test_data_set_0/input_*.pb`` in the order of the inputs; a ``case0.npz`` with ``names`` and
    ``in_0``, ``in_1``, ...; or an .npz with the model's name, by input.
    """
    sets = sorted(path.parent.glob("test_data_set_*"))
    if sets:
        files = sorted(sets[0].glob("input_*.pb"), key=lambda f: int(f.stem.split("_")[1]))
        arrays = [numpy_helper.to_array(onnx.load_tensor(f)) for f in files]
        return dict(zip((v.name for v in model.inputs), arrays, strict=False))
    case, own = path.parent / "case0.npz", path.with_suffix(".npz")
    if case.exists():
        with np.load(case) as arrays:
            return {str(n): arrays[f"in_{i}"] for i, n in enumerate(arrays["names"])}
    if own.exists():
        return dict(np.load(own))
    return random_inputs(model)


def random_inputs(model: onnx2jax.Model, seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs: free dimensions are 1, integers 0 or 1."""
    rng = np.random.default_rng(seed)
    result = {}
    for value in model.inputs:
        kind: Any = value.type
        shape = [d if isinstance(d, int) else 1 for d in kind.shape]
        integer = kind.dtype.kind in "iub"
        array = rng.integers(0, 2, shape) if integer else rng.normal(size=shape)
        result[value.name] = np.asarray(array).astype(kind.dtype)
    return result


def live_bytes(path: Path) -> int:
    """The peak bytes of live activations over the nodes, by shape inference; free extents are 1.

    A runtime that computes node by node without sharing memory needs as much; with fusion it may need less.
    """
    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    graph = model.graph
    sizes = {v.name: _size(v) for v in (*graph.input, *graph.value_info, *graph.output)}
    for weight in graph.initializer:
        sizes.pop(weight.name, None)
    last = {name: i for i, node in enumerate(graph.node) for name in node.input}
    last |= {v.name: len(graph.node) for v in graph.output}
    alive = {v.name for v in graph.input}
    most = 0
    for i, node in enumerate(graph.node):
        alive |= set(node.output)
        most = max(most, sum(sizes.get(n, 0) for n in alive))
        alive = {n for n in alive if last.get(n, -1) > i}
    return most


def _size(value: onnx.ValueInfoProto) -> int:
    kind = value.type.tensor_type
    if not kind.elem_type or kind.elem_type == onnx.TensorProto.STRING:
        return 0
    item = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize
    return item * int(np.prod([d.dim_value or 1 for d in kind.shape.dim], dtype=np.int64))
