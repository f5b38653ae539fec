"""Exports of torch modules by its two exporters: from a traced program (dynamo), and from a script (the older one)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .case import Export, Inputs

DYNAMO, SCRIPT = "torch.onnx dynamo", "torch.onnx script"
EXPORTERS = (DYNAMO, SCRIPT)


def export(
    module: Any,
    sizes: Sequence[Sequence[Any]],
    folder: Path,
    exporter: str,
    *,
    opset: int | None = None,
    names: Sequence[str] | None = None,
    **options: Any,
) -> Export:
    """A module exported.

    Args:
        module: in evaluation mode when it returns; its outputs are tensors, or tuples, lists, maps of them.
        sizes: the positional arguments, tensors, for one or two sizes; what differs in their shapes is dynamic.
        exporter: DYNAMO or SCRIPT.
        opset: the exporter's default when None.
        names: of the inputs; ``x0``, ``x1``, ... when None.
        **options: more for ``torch.onnx.export``.
    """
    import torch

    torch.backends.mha.set_fastpath_enabled(False)  # an operator that the older exporter can't write
    module = _stirred(module.eval())
    path = folder / "model.onnx"
    names = list(names or (f"x{i}" for i in range(len(sizes[0]))))
    axes = {
        name: {axis: f"{name}_{axis}" for axis in range(a.ndim) if a.shape[axis] != b.shape[axis]}
        for name, a, b in zip(names, sizes[0], sizes[-1], strict=True)
    }
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if exporter == DYNAMO:
            shapes: tuple[Any, ...] = tuple(dict.fromkeys(axes[name], torch.export.Dim.AUTO) for name in names)
            if any(p.kind is p.VAR_POSITIONAL for p in signature(module.forward).parameters.values()):
                shapes = (shapes,)
            options = {"dynamic_shapes": shapes, "verbose": False, **options}
        else:
            options = {"dynamic_axes": {n: a for n, a in axes.items() if a}, **options}
        torch.onnx.export(
            module, tuple(sizes[0]), path, input_names=names, dynamo=exporter == DYNAMO, opset_version=opset, **options
        )
    given = _inputs_of(path)
    inputs = [{n: _array(v) for n, v in zip(names, args, strict=True) if n in given} for args in sizes]
    params = {n: _array(p) for n, p in module.named_parameters()}
    with torch.no_grad():
        expected = [[_array(o) for o in flat(module(*args))] for args in sizes]

    def gradients(inputs: Inputs, cotangents: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        leaves = [torch.tensor(inputs[n]) if n in inputs else a.clone() for n, a in zip(names, sizes[0], strict=True)]
        wanted = {n: leaf.requires_grad_() for n, leaf in zip(names, leaves, strict=True) if leaf.is_floating_point()}
        for parameter in module.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        wanted |= dict(module.named_parameters())
        outputs = [o for o in flat(module(*leaves)) if o.is_floating_point() and o.numel()]
        products = [(o * torch.tensor(c)).sum() for o, c in zip(outputs, cotangents, strict=True)]
        total = sum(p for p in products if p.requires_grad) + sum(0 * leaf.sum() for leaf in wanted.values())
        slopes = torch.autograd.grad(total, [*wanted.values()])
        return {n: _array(g) for n, g in zip(wanted, slopes, strict=True)}

    return Export(path, inputs, expected, gradients, params)


def _stirred(module: Any) -> Any:
    """A module as if it had been trained: its scales, shifts, tokens and statistics are not ones and zeros.

    Exporters keep one of two weights with the same numbers; a product with ones looks like the other factor.
    """
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            vector = parameter.numel() == max(parameter.shape, default=1)
            if parameter.is_floating_point() and (vector or not parameter.any()):
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.add_(0.1 * torch.randn_like(buffer))
            elif name.endswith("running_var"):
                buffer.mul_(0.5 + torch.rand_like(buffer))
    return module


def flat(value: Any) -> list[Any]:
    """The tensors of an output, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for v in value.values() for t in flat(v)]
    if isinstance(value, list | tuple):
        return [t for v in value for t in flat(v)]
    return []


def _array(tensor: Any) -> np.ndarray:
    import torch

    tensor = tensor.detach().cpu().resolve_conj()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return np.asarray(tensor.numpy())


def _inputs_of(path: Path) -> set[str]:
    """Exporters drop inputs that nothing reads."""
    import onnx

    return {v.name for v in onnx.load(path, load_external_data=False).graph.input}
