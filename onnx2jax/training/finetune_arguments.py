"""Validates the arguments of ``finetune``, batches, and the results of a loss."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..errors import InputNameError, InputShapeError, InputTypeError, KnownValueError, LossError, ShardingError
from ..eval.node_errors import bound_fix
from ..ir.graph import Node
from ..model.caches import Caches
from ..model.model import Model
from ..sharding.plans import mesh_of
from ..sharding.processes import check_mesh
from ..sharding.rules import own_rules
from .decoders import derived_inputs, next_token_loss, pad_ragged

Metrics = dict[str, jax.Array]


def check_options(
    model: Any, loss: Any, optimizer: Any, accumulate: int, mesh: Mesh | None, shardings: Mapping[str, Any] | None
) -> None:
    """Checks model, optimizer, number of microbatches, and shardings.

    Raises:
        InputTypeError: the model is not a Model, or the optimizer not an optax optimizer.
        InputShapeError: ``accumulate`` is below 1.
        ShardingError: shardings without a mesh, or a mesh that is none.
    """
    if not isinstance(model, Model):
        source = repr(str(model)) if isinstance(model, str | os.PathLike) else "source"
        raise InputTypeError(
            f"finetune takes a Model, not {type(model).__name__}: finetune(onnx2jax.convert({source}), loss, optimizer)"
        )
    if hasattr(loss, "init") and hasattr(loss, "update"):
        raise InputTypeError("the arguments are swapped: finetune(model, loss, optimizer)")
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise InputTypeError(f"optimizer is {optimizer!r:.60}, not an optax optimizer such as optax.adam(1e-3)")
    if accumulate < 1:
        raise InputShapeError(f"accumulate is {accumulate}; it is a number of microbatches, 1 or more")
    check_mesh(mesh)
    if shardings and mesh is None:
        raise ShardingError(f"shardings need the mesh whose axes they name: mesh={mesh_of(own_rules(shardings))}")


def as_loss(
    loss: Any, outputs: str | Sequence[str] | None, model: Model
) -> tuple[Callable[[Any, dict[str, Any]], Any], str | Sequence[str] | None]:
    """The loss function, and the outputs that it needs (None for all).

    Raises:
        InputTypeError: the loss is neither a function nor the name of one.
    """
    if loss == "next_token":
        names = [v.name for v in model.outputs]
        return next_token_loss, ["logits"] if outputs is None and "logits" in names else outputs
    if not callable(loss):
        raise InputTypeError(f"loss is {loss!r:.60}; it is a function of outputs and batch, or 'next_token'")
    return loss, outputs


def checked_batch(model: Model, decoder: Caches, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch as arrays by name; ragged lists are padded. Inputs with defaults may be missing.

    Raises:
        InputShapeError: the lengths of a ragged entry differ from those of ``input_ids``.
        InputNameError: an input is missing.
        InputTypeError: an entry has a dtype that JAX does not support.
    """
    batch = pad_ragged(model, batch)
    available = {*batch, *derived_inputs(decoder, batch)}
    missing = [v.name for v in model.inputs if v.name not in available]
    if missing:
        raise InputNameError(
            f"the batch has no entry {', '.join(map(repr, missing))}; it has {list(batch)}, and the model's inputs "
            f"are ({', '.join(map(str, model.inputs))})"
        )
    arrays = {n: v if isinstance(v, jax.Array | np.ndarray) else np.asarray(v) for n, v in batch.items()}
    for name, value in arrays.items():
        if isinstance(value, np.ndarray) and value.dtype.kind in "OUS":
            raise InputTypeError(
                f"entry {name!r} of the batch has dtype {value.dtype}, which JAX does not support: "
                f"leave it out, or fix the input, convert(..., static={{{name!r}: strings}})"
            )
    return arrays


def checked_loss(result: Any) -> tuple[Any, Metrics]:
    """(loss, metrics) from the result of a user's loss function.

    Raises:
        LossError: the loss is not a floating-point scalar, or the metrics are not a dict.
    """
    value, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    value = jnp.asarray(value)
    if value.shape:
        raise LossError(f"the loss has shape {list(value.shape)}; it must be a scalar: loss.mean()")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise LossError(f"the loss is {value.dtype}, which has no gradient; it must have a floating dtype")
    if not isinstance(metrics, Mapping) or metrics.keys() & {"loss", "grad_norm", "loss_scale"}:
        raise LossError(
            f"the loss returns {metrics!r:.60} as metrics, not a dict of metrics in which the names 'loss', "
            "'grad_norm' and 'loss_scale' are reserved"
        )
    return value, {n: jnp.asarray(v) for n, v in metrics.items()}


def explained(error: KnownValueError) -> KnownValueError:
    """The error of a model that cannot be one program, with ways to fix it."""
    what, node = str(error).split(chr(10))[0], error.node
    bound = bound_fix(node) if isinstance(node, Node) else ""
    return KnownValueError(
        f"{what}\nA training step is one program, so the graph cannot be partitioned here. Specialise on the input "
        f"that determines the value: convert(..., static={{'input name': value}}){bound}; or omit outputs that the "
        "loss does not need: finetune(..., outputs=['output name'])",
        error.values,
        node,
    )


def master_dtype(dtype: np.dtype) -> Any:
    """The dtype in which a parameter is updated: float32 for 16-bit ones, as optimizer steps would round away."""
    return jnp.float32 if dtype.itemsize < 4 else dtype
