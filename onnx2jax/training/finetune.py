"""Fine-tuning of inference models with a user's loss and an optax optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from .. import compat
from ..errors import InputNameError, ShardingError, TrainingFormError, known_keywords
from ..eval.values import to_host
from ..ir import analysis
from ..ir.casts import NARROWER
from ..model.build import process_state
from ..model.model import Model
from ..runtime.multi_device_jit import Spread
from ..sharding.plans import by_rules
from ..sharding.processes import in_agreement
from ..sharding.rules import own_rules
from . import lora as low_rank
from .checkpoint import load_checkpoint, save_checkpoint
from .decoders import check_targets, next_token_loss
from .engine import CompiledStep, FineTuningState, TrainingEngine, check_not_donated, summary
from .form import select_outputs, stored_in, training_form
from .loss_watch import LossWatch
from .objective import (
    Arrays,
    Metrics,
    Objective,
    accumulated,
    apply_gradients,
    as_loss,
    check_options,
    checked_batch,
    initial_scale,
    master_dtype,
    scaled_gradient,
)
from .progress_bar import bar
from .straight_through import warn_of_zero_gradients, with_straight_through
from .weights import select_trainable

Loss = Callable[[Any, dict[str, Any]], Any] | Literal["next_token"]
Trainable = str | Iterable[str] | Callable[[str, Any], bool] | None


class Progress(NamedTuple):
    """The result of one step of ``fit``. The next step donates ``state``: keep only the latest."""

    state: FineTuningState
    metrics: Metrics


class FineTuning(TrainingEngine):
    """Fine-tunes a model with your own loss and optimizer, as pure functions of a state.

    Args:
        model: the Model to train; it is not modified. Of one that computes in bfloat16 or float16 (``convert(dtype=)``)
            parameters, gradients and optimizer are float32 in the state; they are cast inside the step. Of one that
            computes in float64 they are float64.
        loss: ``loss(outputs, batch)`` returns a floating-point scalar, or the scalar and a dict of metrics.
            ``outputs`` is the result of ``model(...)``, ``batch`` the dict passed to ``step``. It is traced with 64-bit
            types enabled, so int64 labels stay int64. "next_token" is ``next_token_loss`` of the output ``logits``.
        optimizer: an optax optimizer.
        trainable: which parameters to train: fnmatch patterns (``"*.bias"``), or a predicate of name and array. By
            default the weights of linear maps, embeddings, convolutions, normalisations and recurrences, but no rotary
            tables, masks, quantization scales or constants (``left_out`` lists them). Running statistics of
            BatchNormalization, and scalars of rank 0 (usually exponents and epsilons), must be named in full.
        lora: a rank: every linear map (MatMul, Gemm or MatMulNBits with a stored matrix that no other node reads)
            computes ``x W + x A B`` with trained A [in, rank] and B [rank, out] in float32. Or a dict of ranks by
            patterns of weight or node names, of which the first match applies: ``{"*q_proj*": 8, "*v_proj*": 8}``. The
            weights are frozen, packed ones included; ``trainable`` then adds further parameters.
        lora_alpha: scales ``x A B`` by ``lora_alpha / rank``, as in peft; by 1 if None.
        batchnorm: "frozen" normalises by the file's running statistics. "train" normalises by the batch and updates the
            statistics with the nodes' momentum, as ONNX defines (``old * momentum + batch * (1 - momentum)``, with the
            variance over n, where PyTorch uses that over n - 1).
        dropout: True activates Dropout nodes at their own ratios, a number at that rate. Nodes that an exporter has
            removed cannot be restored.
        accumulate: number of microbatches into which a step splits its batch, run in turn to save memory. Gradients and
            metrics are their means, equal to those of the whole batch if the loss is a mean over examples. For a mean
            over something else, ``loss.weight(batch)`` returns the count, as ``next_token_loss`` does.
        compute_dtype: "bfloat16" computes float32 products, convolutions and recurrences in bfloat16. Parameters,
            optimizer, sums, normalisations and loss stay in float32.
        remat: patterns of node names. The nodes of each pattern, and all nodes between them, are rematerialised in the
            backward pass (``jax.remat``): less memory, more time. True: the nodes of each layer, by the number in their
            names (``/model/layers.0/...``), or those that ``convert(scan_layers=True)`` found.
        straight_through: straight-through estimators for every QuantizeLinear followed by a DequantizeLinear
            (quantization-aware training): gradients as if nothing were rounded, zero where values saturate. Outputs are
            unchanged. Without it, these gradients are zero, as the derivative of rounding is.
        outputs: the values for the loss, if not all outputs: some of them, or inner values of the main graph, such as
            the logits before a Softmax. ``to_model`` keeps all outputs.
        mesh: devices: batches are sharded over its first axis, parameters according to ``shardings``; defaults to the
            placement of the model.
        shardings: PartitionSpecs by patterns of parameter names; parameters without a match are replicated.

    Attributes:
        trainable: the names of the trained parameters; adapters are ``NAME.lora_A`` and ``NAME.lora_B`` for the weight
            NAME.

    Raises:
        InputNameError: a pattern matches nothing.
        InputTypeError: a pattern matches no floating-point weight or no linear map; or not an optax optimizer.
        InputShapeError: a rank is below 1 or above an extent of the weight.
        TrainingFormError: nothing to train; no BatchNormalization or Dropout to activate; no QuantizeLinear followed by
            a DequantizeLinear; a weight that does not support an adapter.

    Warns:
        ZeroGradientWarning: some trained parameters get zero gradients, because of rounding.

    >>> import numpy as np, onnx2jax, optax
    >>> model = onnx2jax.convert(onnx2jax.demo_model())
    >>> def loss(logits, batch):
    ...     return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    >>> tuned = onnx2jax.finetune(model, loss, optax.sgd(0.01))
    >>> state = tuned.init()
    >>> batch = {"image": np.ones((8, 1, 8, 8), np.float32), "label": np.zeros(8, int)}
    >>> state, metrics = tuned.step(state, batch)
    >>> bool(tuned.evaluate(state, batch)["loss"] < metrics["loss"])
    True
    >>> again = tuned.to_model(state)
    """

    trainable: tuple[str, ...]

    @known_keywords
    def __init__(
        self,
        model: Model,
        loss: Loss,
        optimizer: Any,
        *,
        trainable: Trainable = None,
        lora: int | Mapping[str, int] | None = None,
        lora_alpha: float | None = None,
        batchnorm: Literal["frozen", "train"] = "frozen",
        dropout: bool | float = False,
        accumulate: int = 1,
        compute_dtype: Any = None,
        remat: bool | str | Sequence[str] = (),
        straight_through: bool = False,
        outputs: str | Sequence[str] | None = None,
        mesh: Mesh | None = None,
        shardings: Mapping[str, PartitionSpec] | None = None,
    ) -> None:
        compat.optional("optax", "train")
        check_options(model, loss, optimizer, accumulate, mesh, shardings)
        loss, outputs = as_loss(loss, outputs, model)
        self._model, self._loss, self._optimizer, self._accumulate = model, loss, optimizer, accumulate
        graph = model.graph if outputs is None else select_outputs(model.graph, outputs)
        self._adapters = low_rank.select_adapters(graph, model.graph, lora, lora_alpha, model.settings.dtype)
        if batchnorm == "train" and model.spec.groups is not None:
            raise TrainingFormError(
                "each group of samples of a model converted with rebatch= would have its own running statistics; leave "
                "batchnorm='frozen'"
            )
        in_loops = remat is True and bool(model.settings.scan_layers)
        graph = low_rank.with_adapters(graph, self._adapters, model)
        self._form = training_form(
            graph,
            with_straight_through(graph) if straight_through else graph,
            batchnorm=batchnorm,
            dropout=dropout,
            compute_dtype=compute_dtype,
            remat=() if in_loops else remat,
            dtype=model.settings.dtype,
        )
        # Without the omitted outputs, parameters may be trainable that determine shapes in the full model.
        self._params = analysis.parameters(self._form.plain)
        self._params |= {n: v for n, v in model.changed().items() if n in self._params}
        if model.settings.dtype in NARROWER:
            self._params |= {n: v for n, v in model.params.items() if n in self._params}
        added = [n for a in self._adapters for n in (a.a, a.b)]
        self.trainable, self._left_out = select_trainable(self._form.plain, self._params, trainable, added)
        warn_of_zero_gradients(
            self._form.training if straight_through else self._form.plain, self.trainable, straight_through
        )
        self._initial = {n: self._params[n] for n in dict.fromkeys((*self.trainable, *self._form.statistics))}
        self._dtypes = {n: np.dtype(v.dtype) for n, v in self._initial.items()}
        self._placement = model.placement if mesh is None else by_rules(self._params, (), mesh, own_rules(shardings))
        self._settings = model.settings if mesh is None else replace(model.settings, place=None)
        if in_loops:
            self._settings = replace(self._settings, scan_layers="remat")
        if self._stages and (accumulate > 1 or batchnorm == "train"):
            raise ShardingError(
                "a model with pipeline stages has its own microbatches, convert(..., stages=n, microbatches=m): leave "
                "out accumulate=, and batchnorm='train', which would normalise each microbatch separately"
            )
        # Scalars are embedded in the program: x ** 2 is cheaper than x ** y.
        scalars = {n: v for n, v in self._params.items() if np.size(v) == 1 and n not in self._initial}
        self._scalars = {n: np.asarray(to_host(v)) for n, v in scalars.items()}
        with in_agreement(self._mesh, "finetune") as processes:
            processes.same(process_state(self._placement, model.origin, {"trainable=": self.trainable}))

    @cached_property
    def _objective(self) -> Objective:
        return Objective(self._model, self._form, self._loss, self._dtypes, self._scalars, self._settings, self._stages)

    @cached_property
    def _update(self) -> Any:
        return Spread(partial(apply_gradients, self._optimizer), self._store)

    def left_out(self) -> dict[str, str]:
        """Parameter name -> why it is not trained, for all that are not."""
        return dict(self._left_out)

    @cached_property
    def _frozen(self) -> dict[str, Any]:
        """Constants that are passed as arguments rather than embedded in the program."""
        others = self._initial.keys() | self._scalars
        frozen = {n: v for n, v in self._params.items() if n not in others}
        return self._put_params(stored_in(self._model.settings.dtype, frozen, self._form))

    @cached_property
    def _step(self) -> CompiledStep:
        return CompiledStep(self, self._train_step, self._bind, self._frozen, donate=True)

    @cached_property
    def _evaluate(self) -> CompiledStep:
        return CompiledStep(self, self._eval_step, self._bind, self._frozen, updates=False)

    def init(self, rng: Any = 0) -> FineTuningState:
        """The initial state, with copies of the model's parameters.

        Args:
            rng: seed or PRNG key, for adapters, dropout and other random operators.
        """
        with compat.enable_x64():
            key = self._key(rng)
            values = {
                n: jnp.array(self._put_param(n, v), master_dtype(self._dtypes[n])) for n, v in self._initial.items()
            }
            for adapter in self._adapters:
                values |= adapter.init(key)
            params = {n: values[n] for n in self.trainable}
            stats = {n: values[n] for n in self._form.statistics}
            opt_state = self._init_optimizer(self._optimizer.init, self._put(params))
            opt_state = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.asarray(leaf).dtype), opt_state)
            scale = initial_scale(self._model.settings.dtype)
            return self._put(FineTuningState(params, stats, opt_state, jnp.zeros((), jnp.int32), key, scale))

    def step(self, state: FineTuningState, batch: Mapping[str, Any]) -> tuple[FineTuningState, Metrics]:
        """One optimizer step. Compiled once for each signature of the batch; donates ``state``.

        Args:
            state: from ``init``, an earlier step, or a checkpoint.
            batch: arrays by name. Entries with the names of inputs are fed to the model; all are passed to the loss.
                NumPy arrays must be equal in all processes; use ``from_process`` for rows per process. For a decoder,
                ragged lists of tokens are padded on the right, and a missing attention mask, positions and empty KV
                caches are added.

        Returns:
            The new state, and the metrics of the batch before the update: ``loss``, ``grad_norm``, and the loss
            function's own; of a model in float16 also ``loss_scale``. There a ``grad_norm`` that is not finite means
            that the gradients overflowed: the step changed nothing but the scale.

        Raises:
            InputError: the batch does not fit the model, or the state was donated to an earlier step; with the loss
                "next_token", a label in a NumPy array is outside the vocabulary.
            LossError: the loss is not a floating-point scalar.
            KnownValueError: the model cannot be compiled as one program.
        """
        return self._step(state, batch)

    def evaluate(self, state: FineTuningState, batch: Mapping[str, Any]) -> Metrics:
        """The metrics of a batch in inference mode: running statistics, no dropout. Compiled like ``step``."""
        return self._evaluate(state, batch)

    def params(self, state: FineTuningState) -> dict[str, jax.Array]:
        """The state's parameters and statistics, for ``onnx2jax.save(params=...)``.

        They have the file's element types; float64 in a model that computes in it.
        """
        check_not_donated(state)
        with compat.enable_x64():
            return {n: jnp.array(v, self._dtypes[n]) for n, v in (state.params | state.stats).items()}

    def to_model(self, state: FineTuningState) -> Model:
        """The Model with the state's parameters.

        Adapters are merged into floating-point weights, rounding once to their dtype. For packed weights, the model
        and its saved file contain them as nodes: MatMul, Mul, MatMul, Add.
        """
        spread = self._model.placement is not None
        params = {n: v if spread else np.asarray(to_host(v)) for n, v in self.params(state).items()}
        model, params = low_rank.merge_adapters(self._model, self._adapters, params, self._params)
        constants = sorted(params.keys() - analysis.parameters(model.graph).keys())
        if constants:
            raise InputNameError(
                f"{constants[:5]} are constants of the full model, because shapes depend on them. Save and convert "
                "the file instead: onnx2jax.save(model, path, params=tuned.params(state))"
            )
        return model.with_params(params)

    def save_adapter(self, path: str | os.PathLike[str], state: FineTuningState) -> Path:
        """Writes the trained parameters alone to a safetensors file, for ``load_adapter``.

        Raises:
            ImportError: safetensors is not installed.
        """
        return save_checkpoint(path, self.params(state), position={"lora": low_rank.scales(self._adapters)})

    def load_adapter(self, path: str | os.PathLike[str], rng: Any = 0) -> FineTuningState:
        """An initial state with the parameters that ``save_adapter`` wrote.

        Raises:
            CheckpointError: the file is damaged, or has other parameters, ranks or scales.
            ImportError: safetensors is not installed.
            FileNotFoundError: no such file.
        """
        state = self.init(rng)
        params, position = load_checkpoint(path, self.params(state))
        low_rank.check_scales(path, position, self._adapters)
        with compat.enable_x64():
            new = {n: jnp.array(v, master_dtype(v.dtype)) for n, v in params.items()}
            params, stats = ({n: new[n] for n in old} for old in (state.params, state.stats))
            return self._put(replace(state, params=params, stats=stats))

    @known_keywords
    def fit(
        self,
        batches: Iterable[Mapping[str, Any]],
        state: FineTuningState | None = None,
        *,
        progress: bool | None = None,
        total: int | None = None,
    ) -> Iterator[Progress]:
        """Takes a step for each batch and yields the result; leave the loop at any time.

        Args:
            batches: the batches, as for ``step``.
            state: the initial state; defaults to ``init()``.
            progress: whether to draw a progress bar with the metrics; None draws it if rich is installed and stderr is
                a terminal.
            total: the number of batches, for the bar; defaults to ``len(batches)`` if it has one.

        Yields:
            ``(state, metrics)`` after each step. Dispatch is asynchronous; reading a metric waits for it.

        Warns:
            NaNLossWarning: the loss of a step is NaN; once, as soon as it has been computed.

        >>> import numpy as np, onnx2jax, optax
        >>> model = onnx2jax.convert(onnx2jax.demo_model())
        >>> tuned = onnx2jax.finetune(model, lambda logits, batch: (logits**2).mean(), optax.sgd(0.003))
        >>> batches = [{"image": np.ones((4, 1, 8, 8), np.float32)}] * 100
        >>> for state, metrics in tuned.fit(batches):
        ...     if metrics["loss"] < 1:
        ...         break
        """
        state = self.init() if state is None else state
        size = len(batches) if isinstance(batches, Sized) else None
        with bar(progress, size if total is None else total) as show, LossWatch() as watch:
            for batch in batches:
                state, metrics = self.step(state, batch)
                show(metrics)
                watch(metrics)
                yield Progress(state, metrics)

    def __repr__(self) -> str:
        rows = {
            "inputs": ", ".join(map(str, self._model.inputs)),
            "trains": summary({n: self._initial[n] for n in self.trainable}),
            "of": summary(self._params),
        }
        return self._describe(self._model.graph.name, rows)

    def _bind(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        arrays = checked_batch(self._model, self._objective.decoder, batch)
        if self._loss is next_token_loss:
            check_targets(self._form.plain.outputs, arrays)
        return self._put_batch(arrays)

    def _train_step(self, state: FineTuningState, frozen: Arrays, batch: Arrays) -> tuple[FineTuningState, Metrics]:
        """The function that ``step`` compiles."""
        key = jax.random.fold_in(state.key, state.step)
        total = partial(self._objective.total, graph=self._form.training, frozen=frozen)
        gradient = scaled_gradient(total, state.loss_scale)
        if self._accumulate > 1:
            gradient = accumulated(gradient, self._accumulate, getattr(self._loss, "weight", lambda _: 1))
        (loss, (metrics, stats)), grads = gradient(state.params, state.stats, batch, key)
        if self._stages:
            return self._update(state, grads, (loss, metrics, stats))

        def reevaluate(params: dict[str, Any]) -> Any:
            return total(params, state.stats, batch, key)[0]

        return apply_gradients(self._optimizer, state, grads, (loss, metrics, stats), reevaluate)

    def _eval_step(self, state: FineTuningState, frozen: Arrays, batch: Arrays) -> Metrics:
        """The function that ``evaluate`` compiles."""
        total = partial(self._objective.total, graph=self._form.plain, frozen=frozen)
        loss, (metrics, _) = total(state.params, state.stats, batch, state.key)
        return {"loss": loss, **metrics}


finetune = FineTuning
"""Alias of FineTuning."""
