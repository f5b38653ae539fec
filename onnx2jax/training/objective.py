"""The loss of a batch as a function of the parameters, and gradient accumulation over microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import InputShapeError, KnownValueError
from ..eval.interpreter import Context, Settings, evaluate
from ..eval.layers import Rolling
from ..ir.graph import Graph
from ..model.caches import Caches, caches
from ..model.calls import arguments
from ..model.calls.outputs import as_outputs, field_names
from ..model.model import Model
from ..model.structure import program_of
from ..runtime.dispatch import CallContext, Constants
from ..sharding.stages import Staged
from .decoders import complete_feeds
from .finetune_arguments import Metrics, checked_loss, explained
from .form import Form

Arrays = dict[str, Any]
Total = tuple[Any, tuple[Metrics, Arrays]]
"""(loss, (metrics, new running statistics))."""


@dataclass(eq=False)
class Objective:
    """The training objective: the user's loss of the graph's outputs."""

    model: Model
    form: Form
    loss: Callable[[Any, Arrays], Any]
    dtypes: Mapping[str, np.dtype]
    """The element types of the file, or of a model in float64, by parameter; the state may hold wider ones."""
    constants: Mapping[str, np.ndarray]
    """Parameters embedded in the program as constants."""
    settings: Settings
    stages: Staged | None
    """The placement of a graph that runs as pipeline stages on separate devices."""

    @cached_property
    def decoder(self) -> Caches:
        """The roles of a decoder's inputs."""
        return caches(self.model)

    @cached_property
    def _pipelines(self) -> dict[Graph, Any]:
        """The pipelined program of each graph."""
        return {
            g: program_of(self.model.spec.over(g), self.settings, self.stages)
            for g in (self.form.training, self.form.plain)
        }

    @cached_property
    def _layers(self) -> Rolling | None:
        return Rolling(how) if (how := self.settings.scan_layers) else None

    @cached_property
    def _loss_of_outputs(self) -> Callable[[Sequence[Any], Arrays], tuple[Any, Metrics]]:
        """Loss and metrics from the graph's outputs and the batch; one program of the last stage."""
        fields = field_names(v.name for v in self.form.plain.outputs)

        def loss(results: Sequence[Any], batch: Arrays) -> tuple[Any, Metrics]:
            return checked_loss(self.loss(as_outputs(fields, results), batch))

        return jax.jit(loss) if self.stages else loss

    def total(self, params: Arrays, stats: Arrays, batch: Arrays, key: Any, *, graph: Graph, frozen: Arrays) -> Total:
        """The loss of a batch by one of the form's two graphs, with metrics and new running statistics.

        Raises:
            LossError: the loss is not a floating-point scalar.
            KnownValueError: the graph cannot be compiled as one program.
        """
        model = self.model
        names = {v.name for v in model.inputs} | model.optional.keys()
        feeds = complete_feeds(self.decoder, {n: v for n, v in batch.items() if n in names})
        values = arguments.bind(model.inputs, model.optional, (), feeds, self.settings.dtype) | dict(model.static)
        trained = {n: v.astype(self.dtypes[n]) for n, v in (params | stats).items()}
        try:
            with np.errstate(all="ignore"):
                if self.stages:
                    constants = Constants(self.constants, model.static)
                    results = self._pipelines[graph].outputs(
                        values, CallContext(frozen | trained, constants, key, trained)
                    )
                else:
                    every = {**frozen, **self.constants, **trained}
                    context = Context(every, key, self.settings, layers=self._layers)
                    results = evaluate(model.spec.over(graph), values, context)
        except KnownValueError as e:
            raise explained(e) from e
        count = len(self.form.plain.outputs)
        loss, metrics = self._loss_of_outputs(results[:count], batch)
        new = dict(zip(self.form.statistics, results[count:], strict=False)) or stats
        return loss, (metrics, {n: v.astype(stats[n].dtype) for n, v in new.items()})


def accumulated(gradient: Any, count: int, weight: Callable[[Arrays], Any]) -> Any:
    """A gradient function of ``total`` that splits a batch into ``count`` microbatches and runs them in turn.

    Loss, metrics and gradients are means over the microbatches, weighted by ``weight(microbatch)``; running statistics
    carry over from one to the next.
    """

    def gradient_of_batch(params: Arrays, stats: Arrays, batch: Arrays, key: Any) -> Any:
        parts, shared = _split_batch(batch, count)
        dtype = jnp.result_type(jnp.float32, *{v.dtype for v in params.values()} & {np.dtype(np.float64)})
        weights = [jnp.asarray(weight({n: v[i] for n, v in parts.items()} | shared), dtype) for i in range(count)]
        shares = jnp.stack(weights) / jnp.maximum(sum(weights), 1e-30)

        def microbatch(carry: Any, xs: Any) -> Any:
            stats, sums = carry
            part, i, share = xs
            (loss, (metrics, stats)), grads = gradient(params, stats, part | shared, jax.random.fold_in(key, i))
            sums = jax.tree.map(lambda total, g: total + _weighted(g, share), sums, grads)
            return (stats, sums), jax.tree.map(lambda v: _weighted(v, share), (loss, metrics))

        zeros = jax.tree.map(jnp.zeros_like, params)
        (stats, grads), results = jax.lax.scan(microbatch, (stats, zeros), (parts, jnp.arange(count), shares))
        loss, metrics = jax.tree.map(lambda v: v.sum(0), results)
        return (loss, (metrics, stats)), grads

    return gradient_of_batch


def _split_batch(batch: Arrays, count: int) -> tuple[Arrays, Arrays]:
    """The arrays of a batch as microbatches along a new first axis, and its scalars, which all of them share."""
    extents = {n: v.shape[0] for n, v in batch.items() if v.ndim}
    if len(set(extents.values())) > 1 or any(extent % count for extent in extents.values()):
        raise InputShapeError(f"accumulate={count} does not divide the first axes of the batch evenly: {extents}")
    parts = {n: batch[n].reshape(count, extent // count, *batch[n].shape[1:]) for n, extent in extents.items()}
    return parts, {n: v for n, v in batch.items() if v.ndim == 0}


def _weighted(value: Any, share: Any) -> Any:
    """The contribution of a microbatch to a mean."""
    value = value if jnp.issubdtype(value.dtype, jnp.floating) else value.astype(jnp.float32)
    return value * share.astype(value.dtype)
