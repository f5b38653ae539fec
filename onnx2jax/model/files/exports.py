"""A Model's methods that write files: each imports what it needs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ...errors import known_keywords


class Exports:
    """The methods of a Model that write files."""

    def save(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write the model with its present weights to an ONNX file: ``onnx2jax.save(model, path)``.

        Args:
            path: the file to write.
            **options: keywords of ``onnx2jax.save``.

        >>> import onnx2jax, tempfile
        >>> model = onnx2jax.convert(onnx2jax.demo_model())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save(f"{folder}/digits.onnx").name
        'digits.onnx'
        """
        from .save import save

        return save(self, path, **options)

    @known_keywords
    def export(
        self,
        path: str | os.PathLike[str],
        *,
        dims: Mapping[str, int | str] | None = None,
        constraints: Sequence[str] = (),
        platforms: Sequence[str] | None = None,
        weights: Literal["beside", "inside"] = "beside",
        text: bool = False,
        format: Literal["jax", "stablehlo"] = "jax",
        vjp_order: int = 0,
    ) -> Path:
        """Write the model as a program of ``jax.export``, for machines that have jax and not this library.

        Dimension variables of the file become symbolic dimensions, so one program supports all extents from 1 on; of
        an image's size, if need be, only the multiples of 2, 4, ... or 64, which ``about.json`` lists. The
        folder contains ``program.bin``, ``weights.npz`` with ``params`` by name, and ``about.json``. ``load_exported``
        reads it; with jax, flatbuffers and NumPy alone::

            exported = jax.export.deserialize(Path("out/program.bin").read_bytes())
            types = jax.tree.unflatten(exported.in_tree, exported.in_avals)[0][0]
            with np.load("out/weights.npz") as file:  # NumPy's format stores bfloat16, int4, ... as bytes
                weights = {name: file[name].view(type.dtype) for name, type in types.items()}
            with jax.enable_x64(True):  # if an input has 64 bits
                outputs = exported.call(weights, {"image": images})  # by name; a random key comes third

        ``format="stablehlo"`` writes portable StableHLO bytecode for other compilers, such as IREE: ``program.mlirbc``
        with a function ``main`` of positional arrays, whose names, dtypes and shapes ``about.json`` lists under
        ``arguments`` (inputs, two words of a random key, weights) and ``results``. All extents are fixed there.

        Args:
            path: the folder, created if it does not exist.
            dims: by dimension variable an extent, ``{"batch": 8}``, or an expression of others and of new symbols:
                ``{"total": "past + sequence"}``; ``{"past": "p - 1"}`` may be 0. A dimension without a name is called
                ``input_axis``; characters that are invalid in Python's identifiers become ``_`` in symbols.
            constraints: on dimensions and symbols of ``dims``, by ``==``, ``<=`` or ``>=``: ``["sequence <= 512"]``.
            platforms: platforms to lower for: ``cpu``, ``cuda``, ``rocm``, ``tpu``; none of them need be available. The
                default is cpu, cuda and tpu; a StableHLO program is for one, by default cpu.
            weights: ``"inside"`` makes them constants of the program; there is no ``weights.npz`` then.
            text: write the program as StableHLO's text too, ``program.mlir``.
            format: ``"jax"``, which ``load_exported`` reads, or ``"stablehlo"``.
            vjp_order: how many times the program can be differentiated: 1 for gradients with respect to inputs and
                weights. The program grows with each.

        Returns:
            The folder.

        Raises:
            InputNameError, InputShapeError, InputTypeError, InputValueError: ``dims`` or ``constraints`` do not match
                the model; an unknown platform.
            KnownValueError: the model is no single program: see ``explain``.
            UnsupportedError: an input is no tensor of numbers, JAX cannot lower an operation for a platform, or its
                gradient, or a StableHLO program calls functions that only XLA has.
            ImportError: flatbuffers is not installed, which the format of jax needs.

        >>> import numpy as np, onnx2jax, tempfile
        >>> model = onnx2jax.convert(onnx2jax.demo_model())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     again = onnx2jax.load_exported(model.export(f"{folder}/out", platforms=["cpu"]))
        >>> again(np.zeros((2, 1, 8, 8), np.float32)).shape
        (2, 10)
        """
        from .export import export

        return export(self, path, dims or {}, constraints, platforms, weights, text, format, vjp_order)
