"""What ``finetune`` is given, checked: which parameters, batches, the results of a loss."""

from __future__ import annotations

import difflib
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
)
from ..ir.graph import Graph
from ..model.caches import Caches
from ..model.model import Model
from ..proto.mapped import load
from .decoders import made, next_token_loss, padded
from .form import statistics_of
from .weights import no_weights

Metrics = dict[str, jax.Array]


def check_told(optimizer: Any, accumulate: int, mesh: Mesh | None, shardings: Mapping[str, Any] | None) -> None:
    """Refuse what no training can be made of.

    Raises:
        InputTypeError: the optimizer is none of optax.
        InputShapeError: there is no such number of micro-batches.
        ShardingError: shardings without a mesh.
    """
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise InputTypeError(f"optimizer is {optimizer!r:.60}, not an optax optimizer such as optax.adam(1e-3)")
    if accumulate < 1:
        raise InputShapeError(f"accumulate is {accumulate}; it is a number of micro-batches, 1 or more")
    if shardings and mesh is None:
        raise ShardingError("shardings are given without the devices they speak of: finetune(..., mesh=mesh)")


def as_loss(
    loss: Any, outputs: Sequence[str] | None, model: Model
) -> tuple[Callable[[Any, dict[str, Any]], Any], Sequence[str] | None]:
    """The function that a loss stands for, and the outputs that it needs; None for all.

    Raises:
        InputTypeError: it is no function, and no name of one.
    """
    if loss == "next_token":
        names = [v.name for v in model.outputs]
        return next_token_loss, ["logits"] if outputs is None and "logits" in names else outputs
    if not callable(loss):
        raise InputTypeError(f"loss is {loss!r:.60}; it is a function of outputs and batch, or 'next_token'")
    return loss, outputs


def chosen(
    graph: Graph, params: Mapping[str, Any], trainable: Any, adapters: Collection[str] = ()
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The names of the parameters to train, in the model's order, and for each of the others why it is left out.

    Those of ``adapters`` are trained in any case, and without ``trainable`` they alone.

    Raises:
        InputNameError: a pattern that matches nothing.
        InputTypeError: a parameter that is no floating one.
        TrainingFormError: there are none.
    """
    statistics, others = statistics_of(graph), no_weights(graph, params)
    floating = [n for n, v in params.items() if jnp.issubdtype(v.dtype, jnp.floating) and v.dtype.itemsize > 1]
    usual = [n for n in floating if n not in statistics and np.ndim(params[n])]
    if trainable is None:
        names = set() if adapters else params.keys() - others
    elif callable(trainable):
        names = {n for n in usual if trainable(n, load(params[n]))}
    else:
        names = set()
        for pattern in [trainable] if isinstance(trainable, str) else trainable:
            found = {pattern} if pattern in floating else {n for n in usual if fnmatchcase(n, pattern)}
            names |= found or _nothing(params, pattern)
    names |= set(adapters)
    if not names:
        kinds = sorted({str(v.dtype) for v in params.values()})
        raise TrainingFormError(
            f"nothing to train: of the model's {len(params)} parameters ({', '.join(kinds) or 'none'}) "
            f"{len(usual)} are floating ones, of which trainable={trainable!r} chooses none; those that are no weights "
            f"of layers have to be named: {dict(list(others.items())[:3])}"
        )
    trained = tuple(n for n in params if n in names)
    frozen = "frozen: adapters are trained" if adapters else "not chosen by trainable="
    return trained, {n: others.get(n, frozen) for n in params if n not in names}


def _nothing(params: Mapping[str, Any], pattern: str) -> set[str]:
    other = [n for n in params if n == pattern or fnmatchcase(n, pattern)]
    if other:
        raise InputTypeError(
            f"trainable has {pattern!r}, which are no floating weights: "
            f"{', '.join(f'{n} ({params[n].dtype}{list(params[n].shape)})' for n in other[:3])}. Quantised "
            "ones cannot be trained; a running statistic or a scalar of rank 0 has to be named in full"
        )
    near = difflib.get_close_matches(pattern, params, 3, 0.3) or list(params)[:5]
    raise InputNameError(f"trainable has {pattern!r}, which no parameter matches; near it are {near}")


def checked_batch(model: Model, decoder: Caches, batch: Mapping[str, Any]) -> dict[str, Any]:
    """A batch as arrays by name, with an entry for each of the model's inputs that cannot be made from others.

    Raises:
        InputShapeError: lists that are not as long as those of ``input_ids``.
        InputNameError: an input is missing.
        InputTypeError: the batch is no dict, or holds what JAX cannot compute with.
    """
    batch = padded(model, batch)
    given = {*batch, *made(decoder, batch)}
    missing = [v.name for v in model.inputs if v.name not in given]
    if missing:
        raise InputNameError(
            f"the batch has no entry {', '.join(map(repr, missing))}; it has {list(batch)}, and the model's inputs "
            f"are ({', '.join(map(str, model.inputs))})"
        )
    arrays = {n: v if isinstance(v, jax.Array | np.ndarray) else np.asarray(v) for n, v in batch.items()}
    for name, value in arrays.items():
        if isinstance(value, np.ndarray) and value.dtype.kind in "OUS":
            raise InputTypeError(f"entry {name!r} of the batch holds {value.dtype}, but JAX computes with numbers")
    return arrays


def checked_loss(result: Any) -> tuple[Any, Metrics]:
    """The loss and the metrics of what a user's function returned.

    Raises:
        LossError: they are not one floating number and a dict.
    """
    value, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    value = jnp.asarray(value)
    if value.shape:
        raise LossError(f"the loss has shape {list(value.shape)}; it is one number: loss.mean()")
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise LossError(f"the loss is {value.dtype}, which has no gradient; it is a floating number")
    if not isinstance(metrics, Mapping) or metrics.keys() & {"loss", "grad_norm"}:
        raise LossError(
            f"the loss returns {metrics!r:.60} beside its value; that is a dict of metrics, in which 'loss' and "
            "'grad_norm' are taken"
        )
    return value, {n: jnp.asarray(v) for n, v in metrics.items()}


def staged(error: KnownValueError) -> KnownValueError:
    """The error of a model that is several programs, with what can be done about it."""
    what, node = str(error).split(chr(10))[0], error.node
    return KnownValueError(
        f"{what}\nA step of training is one program, so the model cannot run in stages here. Pin the input that the "
        "value comes from: convert(..., static={'input name': value}); bound what the node finds: convert(..., "
        f"max_size={{{getattr(node, 'name', 'node')!r}: n}}); or leave out what the loss does not need: "
        "finetune(..., outputs=['output name'])",
        error.values,
        node,
    )


def kept_in(dtype: np.dtype) -> Any:
    """Steps are too small for 16 bits: such parameters are kept in float32."""
    return jnp.float32 if dtype.itemsize < 4 else dtype
