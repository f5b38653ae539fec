"""Validates the arguments of ``finetune``: which parameters to train, batches, and the results of a loss."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from ..errors import (
    InputNameError,
    InputShapeError,
    InputTypeError,
    KnownValueError,
    LossError,
    ShardingError,
    TrainingFormError,
    nearest,
)
from ..eval.node_errors import bound_fix
from ..ir.graph import Graph, Node
from ..model.caches import Caches
from ..model.model import Model
from ..proto.mapped import load
from ..sharding.plans import mesh_of
from ..sharding.processes import check_mesh
from ..sharding.rules import own_rules
from .decoders import derived_inputs, next_token_loss, pad_ragged
from .weights import SCALAR, STATISTIC, reasons_untrained

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


def select_trainable(
    graph: Graph, params: Mapping[str, Any], trainable: Any, adapters: Collection[str] = ()
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The names of the parameters to train, in the model's order, and for each other parameter why it is not trained.

    The parameters of ``adapters`` are always trained; without ``trainable``, no others are.

    Raises:
        InputNameError: a pattern matches no parameter.
        InputTypeError: a pattern matches only parameters that are not floating-point weights.
        TrainingFormError: nothing is selected.
    """
    reasons = reasons_untrained(graph, params)
    floating = [n for n, v in params.items() if jnp.issubdtype(v.dtype, jnp.floating) and v.dtype.itemsize > 1]
    usual = [n for n in floating if reasons.get(n) not in (STATISTIC, SCALAR)]
    if trainable is None:
        names = set() if adapters else params.keys() - reasons
    elif callable(trainable):
        names = {n for n in usual if trainable(n, load(params[n]))}
    else:
        names = set()
        for pattern in [trainable] if isinstance(trainable, str) else trainable:
            matches = {pattern} if pattern in floating else {n for n in usual if fnmatchcase(n, pattern)}
            names |= matches or _no_match(params, pattern)
    names |= set(adapters)
    if not names and not params:
        raise TrainingFormError(f"nothing to train: the model has no parameters{_in_attributes(graph)}")
    if not names:
        dtypes = sorted({str(v.dtype) for v in params.values()})
        raise TrainingFormError(
            f"nothing to train: {len(usual)} of the model's {len(params)} parameters ({', '.join(dtypes)}) "
            f"have a floating dtype, and trainable={trainable!r} selects none of them; parameters that are not weights "
            f"of layers must be named: {dict(list(reasons.items())[:3])}"
        )
    trained = tuple(n for n in params if n in names)
    frozen = "frozen: adapters are trained" if adapters else "not selected by trainable="
    return trained, {n: reasons.get(n, frozen) for n in params if n not in names}


def _in_attributes(graph: Graph) -> str:
    """The nodes that keep their numbers as attributes, as the end of a message; empty if there are none."""
    nodes = [node for g in graph.walk() for node in g.nodes if any(map(_is_numbers, node.attributes.values()))]
    if not nodes:
        return ""
    return (
        f". Its numbers are attributes of {', '.join(map(str, nodes[:3]))}, which training does not change: fit it in "
        "the library that made the file"
    )


def _is_numbers(value: Any) -> bool:
    """Whether an attribute is several floating-point numbers."""
    several = value.tolist() if isinstance(value, np.ndarray) else value
    return isinstance(several, tuple | list) and len(several) > 1 and all(isinstance(v, float) for v in several)


def _no_match(params: Mapping[str, Any], pattern: str) -> set[str]:
    other = [n for n in params if n == pattern or fnmatchcase(n, pattern)]
    if other:
        raise InputTypeError(
            f"trainable has {pattern!r}, which matches no floating-point weights, only "
            f"{', '.join(f'{n} ({params[n].dtype}{list(params[n].shape)})' for n in other[:3])}. Quantised "
            "weights cannot be trained; a running statistic or a scalar of rank 0 must be named in full"
        )
    near = nearest(pattern, params)
    raise InputNameError(f"trainable has {pattern!r}, which no parameter matches; similar names are {near}")


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
