"""Training an inference model: its parameters as a state, a loss of the user's, an optimizer of optax."""

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
from ..errors import InputNameError, ShardingError
from ..ir import analysis
from ..model.convert import process_state
from ..model.model import Model
from ..runtime.multi_device_jit import Spread
from ..runtime.values import to_host
from ..sharding import rules
from ..sharding.processes import together
from ..sharding.stages import Staged
from . import lora as low_rank
from .checkpoint import load_checkpoint, save_checkpoint
from .engine import Step, Training, check_not_used_up, counted
from .finetune_arguments import Metrics, as_loss, check_told, checked_batch, chosen, kept_in
from .form import only, training_form
from .objective import Objective, in_parts
from .progress import bar
from .state import FineTuningState
from .straight import warn_of_rounding, with_straight_through

Loss = Callable[[Any, dict[str, Any]], Any] | Literal["next_token"]
Trainable = str | Iterable[str] | Callable[[str, Any], bool] | None


class Progress(NamedTuple):
    """What ``fit`` yields after a step. The next step takes the state's memory: keep the last one only."""

    state: FineTuningState
    metrics: Metrics


def _refuse_again(_: Any) -> Any:
    raise ShardingError("an optimizer that computes the loss anew, for a line search, takes one program: no stages")


class FineTuning(Training):
    """A model trained on a loss of your own: model, loss and optimizer as functions of a state.

    Args:
        model: what ``convert`` made. It stays as it is.
        loss: ``loss(outputs, batch)``, a floating scalar, or the scalar and a dict of metrics. ``outputs`` is what
            ``model(...)`` returns, ``batch`` the dict that ``step`` was given. It is traced, in a scope with 64-bit
            types, so that int64 labels stay int64. "next_token" is ``next_token_loss``, of the output ``logits``.
        optimizer: an optax optimizer.
        trainable: which parameters: patterns of fnmatch (``"*.bias"``), or a predicate of name and array. Without it,
            the weights of linear maps, embeddings, convolutions, normalisations and recurrences: no rotary tables,
            masks, scales of quantization or constants (``left_out`` lists them). Running statistics of
            BatchNormalization and scalars of rank 0 (exponents and epsilons, more often than weights) are chosen only
            when named in full.
        lora: a rank: every linear map (MatMul, Gemm or MatMulNBits with a stored matrix that no other node reads)
            learns ``x A B`` beside ``x W``, with A [in, rank] and B [rank, out] in float32. Or ranks by patterns over
            the names of weights and of nodes, the first that matches counting: ``{"*q_proj*": 8, "*v_proj*": 8}``.
            The weights stay as they are, packed ones too; ``trainable`` then names what is trained beside.
        lora_alpha: ``x A B`` is multiplied by ``lora_alpha / rank``, as in peft; by 1 when left out.
        batchnorm: "frozen" normalises by the running statistics of the file. "train" normalises by the batch and
            moves the statistics by the nodes' momentum, as ONNX says (``old * momentum + batch * (1 - momentum)``,
            the variance divided by n, where PyTorch moves it by that divided by n - 1).
        dropout: True lets Dropout nodes drop, at their ratios; a number does so at that rate. Nodes that an exporter
            has removed cannot be restored.
        accumulate: micro-batches into which a step divides its batch, one after the other in memory. Gradients and
            metrics are their means: the same as those of the whole batch, for a loss that is a mean over it. Where a
            loss is a mean over something else, ``loss.weight(batch)`` says over how many; ``next_token_loss`` does.
        compute_dtype: "bfloat16" computes products, convolutions and recurrences of float32 in it. Parameters,
            optimizer, sums, normalisations and loss stay in float32.
        remat: patterns of node names. The nodes of each pattern, with what lies between them, keep no values
            for the backward pass but compute them again (``jax.remat``): less memory, more time. True: the nodes of
            each layer, by the number in their names (``/model/layers.0/...``).
        straight_through: gradients through every QuantizeLinear that a DequantizeLinear follows, as though it did not
            round (and zero where it clips): training that is aware of quantization. The numbers stay the same. Without
            it such gradients are zero, as the derivatives of rounding are.
        outputs: the outputs that the loss needs, when the model has others that cannot be compiled.
        mesh: devices over which batches are divided, along its first axis, and parameters as ``shardings`` says; those
            of the model when left out.
        shardings: PartitionSpecs by patterns of parameter names; what none matches is on every device.

    Attributes:
        trainable: the names of the parameters that are trained; of adapters ``NAME.lora_A`` and ``NAME.lora_B``,
            where NAME is the weight.

    Raises:
        InputNameError: a pattern that matches nothing.
        InputTypeError: a parameter that is no floating one, or no linear map; an optimizer that is none.
        InputShapeError: a rank that is less than 1 or more than an extent of the weight.
        TrainingFormError: nothing to train; no BatchNormalization or Dropout to switch; no QuantizeLinear that a
            DequantizeLinear follows; a weight that takes no adapter.

    Warns:
        ZeroGradientWarning: all that some weights decide is rounded, so that they will not move.

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
        outputs: Sequence[str] | None = None,
        mesh: Mesh | None = None,
        shardings: Mapping[str, PartitionSpec] | None = None,
    ) -> None:
        compat.optional("optax", "train")
        check_told(optimizer, accumulate, mesh, shardings)
        loss, outputs = as_loss(loss, outputs, model)
        self._model, self._loss, self._optimizer, self._accumulate = model, loss, optimizer, accumulate
        graph = model.graph if outputs is None else only(model.graph, outputs)
        self._adapters = low_rank.adapters(graph, model.graph, lora, lora_alpha)
        self._form = training_form(
            low_rank.adapted(graph, self._adapters, model),
            batchnorm=batchnorm,
            dropout=dropout,
            compute_dtype=compute_dtype,
            remat=remat,
            rounding=with_straight_through if straight_through else None,
        )
        # Without the outputs left out, weights may be parameters that decide shapes in the whole model.
        self._params = analysis.parameters(self._form.plain)
        self._params |= {n: v for n, v in model.changed().items() if n in self._params}
        added = [n for a in self._adapters for n in (a.a, a.b)]
        self.trainable, self._left_out = chosen(self._form.plain, self._params, trainable, added)
        warn_of_rounding(
            self._form.training if straight_through else self._form.plain, self.trainable, straight_through
        )
        self._initial = {n: self._params[n] for n in dict.fromkeys((*self.trainable, *self._form.statistics))}
        self._dtypes = {n: np.dtype(v.dtype) for n, v in self._initial.items()}
        self._placement = (
            model.placement if mesh is None else rules.by_rules(self._params, (), mesh, rules.own_rules(shardings))
        )
        self._settings = model.settings if mesh is None else replace(model.settings, place=None)
        if self._in_stages and (accumulate > 1 or batchnorm == "train"):
            raise ShardingError(
                "a model in stages has micro-batches of its own, convert(..., stages=n, microbatches=m): leave out "
                "accumulate=, and batchnorm='train', which would normalise each of them by itself"
            )
        # Scalars are part of the program: x ** 2 costs less than x ** y.
        scalars = {n: v for n, v in self._params.items() if np.size(v) == 1 and n not in self._initial}
        self._known = {n: np.asarray(to_host(v)) for n, v in scalars.items()}
        with together(self._placement.mesh if self._placement else None, "finetune") as said:
            said.same(process_state(self._placement, model.origin, self.trainable))

    @property
    def _in_stages(self) -> bool:
        """Whether a step is several programs, on devices of their own."""
        return isinstance(self._placement, Staged)

    @cached_property
    def _objective(self) -> Objective:
        return Objective(
            self._model, self._form, self._loss, self._dtypes, self._known, self._settings, self._placement
        )

    @cached_property
    def _update(self) -> Any:
        return Spread(self._updated)

    def left_out(self) -> dict[str, str]:
        """For each parameter that is not trained, why."""
        return dict(self._left_out)

    @cached_property
    def _frozen(self) -> dict[str, Any]:
        """The constants that are passed as arguments rather than compiled in."""
        made = self._initial.keys() | self._known.keys()
        return self._put_params({n: v for n, v in self._params.items() if n not in made})

    @property
    def _how(self) -> dict[str, Any]:
        return {"optimize": self._settings.optimize, "_staged": self._in_stages}

    @cached_property
    def _step(self) -> Step:
        return Step(self, self._stepped, self._bound, self._frozen, donate=True, **self._how)

    @cached_property
    def _evaluate(self) -> Step:
        return Step(self, self._evaluated, self._bound, self._frozen, updates=False, **self._how)

    def init(self, rng: Any = 0) -> FineTuningState:
        """The state before the first step, with copies of the model's parameters.

        Args:
            rng: a seed or a ``jax.random.key``, for adapters, dropout and other draws.
        """
        with compat.enable_x64():
            key = self._key(rng)
            values = {n: jnp.array(self._laid(n, v), kept_in(self._dtypes[n])) for n, v in self._initial.items()}
            for adapter in self._adapters:
                values |= adapter.drawn(key)
            params = {n: values[n] for n in self.trainable}
            stats = {n: values[n] for n in self._form.statistics}
            begin = Spread(self._optimizer.init) if self._in_stages else partial(self._begun, self._optimizer)
            opt_state = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.asarray(leaf).dtype), begin(self._put(params)))
            return self._put(FineTuningState(params, stats, opt_state, jnp.zeros((), jnp.int32), key))

    def step(self, state: FineTuningState, batch: Mapping[str, Any]) -> tuple[FineTuningState, Metrics]:
        """One step of the optimizer. Compiled once for each shape of batch; the state given is used up (donated).

        Args:
            state: from ``init``, an earlier step, or a checkpoint.
            batch: arrays by name. Entries named as the model's inputs are fed; all go to the loss. NumPy arrays are
                the same in all processes; rows of each process go through ``from_process``. Of a decoder that is
                given tokens, lists of unequal lengths are padded on the right, and an attention mask, positions and
                empty caches made where they are left out.

        Returns:
            The new state, and the metrics of the batch before the step: ``loss``, ``grad_norm``, those of the loss.

        Raises:
            InputError: the batch does not fit the model, or the state was used up.
            LossError: the loss is not one floating number.
            KnownValueError: the model cannot be compiled as one program.
        """
        return self._step(state, batch)

    def evaluate(self, state: FineTuningState, batch: Mapping[str, Any]) -> Metrics:
        """The metrics of a batch in inference form: running statistics, nothing dropped. Compiled, like ``step``."""
        return self._evaluate(state, batch)

    def params(self, state: FineTuningState) -> dict[str, jax.Array]:
        """What the state has of ``Model.params``, in the file's element types: for ``onnx2jax.save(params=...)``."""
        check_not_used_up(state)
        with compat.enable_x64():
            return {n: jnp.array(v, self._dtypes[n]) for n, v in (state.params | state.stats).items()}

    def to_model(self, state: FineTuningState) -> Model:
        """The model with the state's parameters: to call, to transform, to save.

        Adapters are added to floating weights, and rounded once to their type. Beside packed weights the model, and
        the file that ``save`` makes of it, has them as nodes: MatMul, Mul, MatMul, Add.
        """
        spread = self._model.placement is not None
        params = {n: v if spread else np.asarray(to_host(v)) for n, v in self.params(state).items()}
        model, params = low_rank.finished(self._model, self._adapters, params, self._params)
        constants = sorted(params.keys() - analysis.parameters(model.graph).keys())
        if constants:
            raise InputNameError(
                f"{constants[:5]} are constants of the whole model, because shapes depend on what is computed from "
                "them. Save, and convert the file: onnx2jax.save(model, path, params=tuned.params(state))"
            )
        return model.with_params(params)

    def save_adapter(self, path: str | os.PathLike[str], state: FineTuningState) -> Path:
        """Write what is trained, and nothing else, to a safetensors file, for ``load_adapter``.

        Raises:
            ImportError: safetensors is not installed.
        """
        return save_checkpoint(path, self.params(state), position={"lora": low_rank.scales(self._adapters)})

    def load_adapter(self, path: str | os.PathLike[str], rng: Any = 0) -> FineTuningState:
        """The state before a first step that goes on from what ``save_adapter`` wrote.

        Raises:
            CheckpointError: the file is damaged, or of other parameters, ranks or scales.
            ImportError: safetensors is not installed.
            FileNotFoundError: no such file.
        """
        state = self.init(rng)
        params, position = load_checkpoint(path, self.params(state))
        low_rank.check_scales(path, position, self._adapters)
        with compat.enable_x64():
            new = {n: jnp.array(v, kept_in(v.dtype)) for n, v in params.items()}
            params, stats = ({n: new[n] for n in old} for old in (state.params, state.stats))
            return self._put(replace(state, params=params, stats=stats))

    def fit(
        self,
        batches: Iterable[Mapping[str, Any]],
        state: FineTuningState | None = None,
        *,
        progress: bool | None = None,
        total: int | None = None,
    ) -> Iterator[Progress]:
        """A step for each batch, each yielded: leave the loop when it is good enough.

        Args:
            batches: the batches, each as ``step`` takes it.
            state: where to begin; ``init()`` when left out.
            progress: a bar with the metrics, by rich; None draws it where rich and a terminal are at hand.
            total: how many batches there are, for the bar; ``len(batches)`` where that can be had.

        Yields:
            ``(state, metrics)`` after each step. Python runs ahead of the computation; looking at metrics waits.

        >>> import numpy as np, onnx2jax, optax
        >>> model = onnx2jax.convert(onnx2jax.demo_model())
        >>> tuned = onnx2jax.finetune(model, lambda logits, batch: (logits**2).mean(), optax.sgd(0.1))
        >>> batches = [{"image": np.ones((4, 1, 8, 8), np.float32)}] * 100
        >>> for state, metrics in tuned.fit(batches):
        ...     if metrics["loss"] < 1:
        ...         break
        """
        state = self.init() if state is None else state
        known = len(batches) if isinstance(batches, Sized) else None
        with bar(progress, known if total is None else total) as show:
            for batch in batches:
                state, metrics = self.step(state, batch)
                show(metrics)
                yield Progress(state, metrics)

    def __repr__(self) -> str:
        rows = {
            "inputs": ", ".join(map(str, self._model.inputs)),
            "trains": counted({n: self._initial[n] for n in self.trainable}),
            "of": counted(self._params),
        }
        return self._described(self._model.graph.name, rows)

    def _bound(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return self._put_batch(checked_batch(self._model, self._objective.decoder, batch))

    def _stepped(
        self, state: FineTuningState, frozen: dict[str, Any], batch: dict[str, Any]
    ) -> tuple[FineTuningState, Metrics]:
        """What jit compiles for ``step``."""
        key = jax.random.fold_in(state.key, state.step)

        total = partial(self._objective.total, graph=self._form.training, frozen=frozen)
        gradient = jax.value_and_grad(total, has_aux=True)
        if self._accumulate > 1:
            gradient = in_parts(gradient, self._accumulate, getattr(self._loss, "weight", lambda _: 1))
        (loss, (metrics, stats)), grads = gradient(state.params, state.stats, batch, key)
        if self._in_stages:
            return self._update(state, grads, (loss, metrics, stats))

        def again(params: dict[str, Any]) -> Any:
            return total(params, state.stats, batch, key)[0]

        return self._updated(state, grads, (loss, metrics, stats), again)

    def _updated(
        self, state: FineTuningState, grads: dict[str, Any], found: tuple[Any, ...], again: Any = _refuse_again
    ) -> tuple[FineTuningState, Metrics]:
        """The next state, given gradients, and loss, metrics and statistics; ``again`` computes the loss anew."""
        loss, metrics, stats = found
        optax = compat.optional("optax", "train")
        updates, opt_state = optax.with_extra_args_support(self._optimizer).update(
            grads, state.opt_state, state.params, value=loss, grad=grads, value_fn=again
        )
        # The state keeps its types, so that the step is compiled once and its memory is used again.
        opt_state = jax.tree.map(lambda new, old: jnp.array(new, old.dtype), opt_state, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        new = FineTuningState(params, stats, opt_state, state.step + 1, state.key)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads.values()))
        return new, {"loss": loss, "grad_norm": norm, **metrics}

    def _evaluated(self, state: FineTuningState, frozen: dict[str, Any], batch: dict[str, Any]) -> Metrics:
        """What jit compiles for ``evaluate``."""
        loss, (metrics, _) = self._objective.total(
            state.params, state.stats, batch, state.key, graph=self._form.plain, frozen=frozen
        )
        return {"loss": loss, **metrics}


finetune = FineTuning
"""The verb, beside ``convert``: another name of FineTuning, whose arguments it takes."""
