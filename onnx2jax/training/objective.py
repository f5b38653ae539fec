"""The parts of a step of ``finetune``: the loss as a function of the parameters, its gradient, and the update.

Also validates arguments, batches, and the results of a loss.

Models in float16, whose smallest normal number is 6e-5, have dynamic loss scaling. The loss is multiplied by a power of
two before it is differentiated, so that small gradients do not underflow, and the gradients are divided by it in
float32. Where they are infinite or NaN, the step leaves parameters, statistics and optimizer as they were and halves
the scale; the scale doubles every 2000 steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .. import compat
from ..errors import InputNameError, InputShapeError, InputTypeError, KnownValueError, LossError, ShardingError
from ..eval.interpreter import Context, Settings, evaluate
from ..eval.layers import Rolling
from ..eval.node_errors import bound_fix
from ..ir.graph import Graph, Node
from ..model.caches import Caches, caches, complete_feeds, derived_inputs
from ..model.calls import arguments
from ..model.calls.outputs import as_outputs, field_names
from ..model.model import Model
from ..model.structure import program_of
from ..proto.types import TensorType
from ..runtime.dispatch import CallContext, Constants
from ..sharding.plans import mesh_of
from ..sharding.processes import check_mesh
from ..sharding.rules import own_rules
from ..sharding.stages import Staged
from .decoders import next_token_loss, pad_ragged
from .engine import FineTuningState
from .form import Form

Arrays = dict[str, Any]
Metrics = dict[str, jax.Array]
Total = tuple[Any, tuple[Metrics, Arrays]]
"""(loss, (metrics, new running statistics))."""
FIRST_SCALE: Final = 2.0**15
LARGEST_SCALE: Final = 2.0**24
DOUBLES_EVERY: Final = 2000
"""Steps."""


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
            try:
                with compat.on_any_platform():
                    result = self.loss(as_outputs(fields, results), batch)
            except (TypeError, ValueError, KeyError) as e:
                e.add_note(f"in the loss of finetune, loss(outputs, batch), whose batch is a dict of {list(batch)}")
                raise
            return checked_loss(result)

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
        fix = "decoder.model" if isinstance(getattr(model, "model", None), Model) else f"onnx2jax.convert({source})"
        raise InputTypeError(f"finetune takes a Model, not {type(model).__name__}: finetune({fix}, loss, optimizer)")
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
    declared = {v.name: (v, v.type) for v in model.inputs}

    def as_array(name: str, value: Any) -> Any:
        info, kind = declared.get(name, (None, None))
        if isinstance(value, list | tuple | int | float) and info is not None and isinstance(kind, TensorType):
            return arguments.from_python(info, kind, value)  # as in a call
        return value if isinstance(value, jax.Array | np.ndarray) else np.asarray(value)

    arrays = {n: as_array(n, v) for n, v in batch.items()}
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


def initial_scale(dtype: Any) -> jax.Array | None:
    """The scale of the first step; None where the model does not compute in float16."""
    return jnp.full((), FIRST_SCALE, jnp.float32) if dtype == np.float16 else None


def _no_reevaluation(_: Any) -> Any:
    raise ShardingError("optimizers with a line search re-evaluate the loss, which is unsupported with pipeline stages")


def scaled_gradient(total: Callable[..., Any], scale: Any) -> Callable[..., Any]:
    """A function that returns what ``total`` does, a loss and more, and the gradients of the loss times the scale."""

    def scaled(*args: Any) -> Any:
        loss, more = total(*args)
        wide = jnp.promote_types(loss.dtype, jnp.float32)
        return loss if scale is None else loss.astype(wide) * scale, (loss, more)

    def differentiated(*args: Any) -> Any:
        (_, results), grads = jax.value_and_grad(scaled, has_aux=True)(*args)
        return results, grads

    return differentiated


def apply_gradients(
    optimizer: Any,
    state: FineTuningState,
    grads: dict[str, Any],
    results: tuple[Any, ...],
    reevaluate: Callable[[dict[str, Any]], Any] = _no_reevaluation,
) -> tuple[FineTuningState, dict[str, Any]]:
    """The next state and the metrics, from the gradients of the scaled loss; the old state where they overflowed.

    Args:
        optimizer: an optax optimizer.
        state: the state before the step.
        grads: the gradients by parameter.
        results: loss, metrics and running statistics.
        reevaluate: returns the loss for other parameters.
    """
    loss, metrics, stats = results
    scale: Any = state.loss_scale
    if scale is not None:
        grads = jax.tree.map(lambda g: g / scale.astype(g.dtype), grads)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads.values()))
    optax = compat.optional("optax", "train")
    updates, opt_state = optax.with_extra_args_support(optimizer).update(
        grads, state.opt_state, state.params, value=loss, grad=grads, value_fn=reevaluate
    )
    # The state keeps its dtypes, so that the step compiles once and its buffers can be donated.
    opt_state = jax.tree.map(lambda new, old: jnp.array(new, old.dtype), opt_state, state.opt_state)
    new = optax.apply_updates(state.params, updates), stats, opt_state
    metrics = {"loss": loss, "grad_norm": norm, **metrics}
    if scale is not None:
        finite, old = jnp.isfinite(norm), (state.params, state.stats, state.opt_state)
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        metrics["loss_scale"] = scale
        scale = next_scale(scale, finite, state.step)
    return FineTuningState(*new, state.step + 1, state.key, scale), metrics


def next_scale(scale: Any, finite: Any, step: Any) -> Any:
    """The scale of the next step."""
    doubles = finite & ((step + 1) % DOUBLES_EVERY == 0)
    factor = jnp.where(finite, jnp.where(doubles, 2.0, 1.0), 0.5).astype(jnp.float32)
    return jnp.minimum(scale * factor, jnp.float32(LARGEST_SCALE))
