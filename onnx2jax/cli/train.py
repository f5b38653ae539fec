"""``onnx2jax train model.onnx data.npz trained.onnx``: training by the file's training_info, or fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np

from .. import compat
from ..ir.file import opened, read
from ..ir.graph import Graph
from ..model.convert import convert
from ..model.files.save import save
from ..progress import stage
from ..proto.types import ValueInfo
from ..training.checkpoint import load_checkpoint, save_checkpoint
from ..training.finetune import FineTuning
from ..training.loss_watch import LossWatch
from ..training.progress_bar import bar
from ..training.training_model import TrainingModel
from .inputs import load
from .parser import Arguments, CommandError, Parser, as_path, computing, loading, number, reading, whole
from .terminal import note, print_result

LOSSES: Final = ("cross_entropy", "mse", "next_token")


def add_train(parser: Parser) -> None:
    """Add the options of the command."""
    parser.describe(
        "train model.onnx digits.npz trained.onnx --loss cross_entropy --epochs 5",
        json="print the means of each epoch as JSON",
    )
    parser.add_argument("data", type=as_path, help="an .npz file of arrays by input, samples along their first axes")
    parser.add_argument("output", type=as_path, help="the trained model's file")
    parser.add_argument("--epochs", type=whole, default=1, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--batch-size",
        type=whole,
        metavar="N",
        help="(default: the model's fixed batch size, or 32); an incomplete last batch of an epoch is dropped",
    )
    parser.add_argument("--seed", type=whole, default=0, help="of shuffling and random draws (default: %(default)s)")
    parser.add_argument("--checkpoint", type=as_path, metavar="FILE.safetensors", help="written after each epoch")
    parser.add_switch("--resume", "continue from --checkpoint")
    stored = parser.add_argument_group("for a file with training_info")
    stored.add_argument("--algorithm", metavar="NAME", help="the algorithm to run (default: all, in order)")
    fine = parser.add_argument_group("for any other file")
    fine.add_argument("--loss", choices=LOSSES)
    fine.add_argument(
        "--target", metavar="NAME", help="the target array of the loss (default: the only array that is not an input)"
    )
    fine.add_argument("--of", metavar="OUTPUT", help="the output, or inner value, for the loss (default: the first)")
    fine.add_argument("--optimizer", choices=("adam", "adamw", "sgd"), default="adam", help="(default: %(default)s)")
    fine.add_argument("--learning-rate", type=number, default=1e-3, metavar="X", help="(default: %(default)s)")
    fine.add_argument("--trainable", action="append", metavar="PATTERN", help="parameters to train; repeatable")
    parser.add_computing(fine)
    fine.add_argument("--lora", type=whole, metavar="RANK", help="train adapters of that rank instead")


def do_train(arguments: Arguments) -> None:
    if arguments.batch_size == 0:
        raise CommandError("--batch-size must be at least 1")
    if arguments.resume and arguments.checkpoint is None:
        raise CommandError("--resume needs --checkpoint FILE.safetensors")
    for path in filter(None, (arguments.output, arguments.checkpoint)):  # fail before training, not after
        if path.is_dir() or not path.parent.is_dir():
            raise CommandError(f"{path} cannot be written: its folder does not exist, or it is a folder itself")
    data = _data(arguments.data)
    with loading(arguments.model):
        file, message, _ = opened(read(arguments.model, **reading(arguments)), {})
        training = _training_info(file, arguments) if message.training_info else _fine_tuning(file, data, arguments)
    fixed = (v.shape[0] for v in training.inputs if v.shape and isinstance(v.shape[0], int))
    size = min(arguments.batch_size or next(fixed, 0) or 32, _samples(data))
    state, begin = training.state, 0
    if arguments.resume:
        state, position = load_checkpoint(arguments.checkpoint, state)
        begin = position["epoch"]
    epochs, watch = [], LossWatch()
    for epoch in range(begin, arguments.epochs):
        seed, what = (arguments.seed, epoch), f"epoch {epoch + 1}"
        state, metrics = _epoch(training.step, state, data, size, seed, what, watch)
        epochs.append({"epoch": epoch + 1, **metrics})
        if not arguments.json:
            numbers = "  ".join(f"{n} {v:.4g}" for n, v in metrics.items())
            print(f"epoch {epoch + 1} of {arguments.epochs}  {numbers}", flush=True)
        if arguments.checkpoint is not None:
            save_checkpoint(arguments.checkpoint, state, position={"epoch": epoch + 1})
    with stage(f"saving {arguments.output.name}"):
        training.save(state, arguments.output)
    facts = {"epochs": epochs, "batch_size": size, "output": str(arguments.output)}
    print_result(arguments, facts, f"saved {arguments.output}")


class _Training(NamedTuple):
    """A training run of either kind."""

    state: Any
    step: Callable[..., Any]
    inputs: Sequence[ValueInfo]
    save: Callable[[Any, Path], Any]


def _training_info(file: Any, arguments: Arguments) -> _Training:
    for option in ("loss", "target", "of", "trainable", "lora"):
        if getattr(arguments, option) is not None:
            raise CommandError(f"the file has training_info, which defines what --{option} would")
    trainer = TrainingModel(file, rng=arguments.seed)
    trainer.initialize()
    step = partial(trainer.step, algorithm=arguments.algorithm)
    inputs = [*chain(*trainer.step_inputs.values())]
    return _Training(trainer.state, step, inputs, lambda state, path: save(trainer, path, state=state))


def _fine_tuning(file: Any, data: Mapping[str, Any], arguments: Arguments) -> _Training:
    if arguments.loss is None:
        raise CommandError(f"the file has no training_info: --loss {'|'.join(LOSSES)}")
    if arguments.algorithm is not None:
        raise CommandError("the file has no training_info, so there is no --algorithm to choose")
    optax = compat.optional("optax", "train")
    model = convert(file, **computing(arguments))
    output = arguments.of or model.outputs[0].name
    if output not in {*model.graph.producers, *(v.name for v in model.outputs)}:
        raise CommandError(f"the model has no output {output!r}; it has {[v.name for v in model.outputs]}")
    loss = _loss(arguments, data, model, output, optax)
    if arguments.loss == "cross_entropy" and (logits := _logits(model.graph, output)) != output:
        note(f"cross_entropy of {logits!r}, the logits before the Softmax of {output!r}")
        output = logits
    tuned = FineTuning(
        model,
        loss,
        getattr(optax, arguments.optimizer)(arguments.learning_rate),
        trainable=arguments.trainable,
        lora=arguments.lora,
        outputs=None if loss == "next_token" and arguments.of is None else [output],
    )
    state = tuned.init(arguments.seed)
    return _Training(state, tuned.step, model.inputs, lambda state, path: save(tuned.to_model(state), path))


def _logits(graph: Graph, output: str) -> str:
    """The operand of the Softmax over the last axis that returns ``output``, or ``output`` itself.

    Cross entropy normalises its operand: probabilities would be normalised twice. LogSoftmax changes nothing.
    """
    node = graph.producers.get(output)
    if node is None or (node.domain, node.op_type) != ("", "Softmax"):
        return output
    axis = node.attributes.get("axis", 1 if node.opset < 13 else -1)
    shape = {v.name: v.shape for v in graph.outputs}.get(output)
    return node.inputs[0] if shape is None or axis in (-1, len(shape) - 1) else output


def _loss(arguments: Arguments, data: Mapping[str, Any], model: Any, output: str, optax: Any) -> Any:
    if arguments.loss == "next_token":
        return "next_token"
    others = [n for n in data if n not in {v.name for v in model.inputs} | model.optional.keys()]
    if arguments.target is None and len(others) != 1:
        raise CommandError(
            f"--target NAME: name the target of the loss; arrays that are not inputs: {others or 'none'}"
        )
    target = arguments.target or others[0]
    if target not in data:
        raise CommandError(f"--target {target}: the data has {sorted(data)}")

    def cross_entropy(output: Any, batch: Mapping[str, Any]) -> Any:
        labels = batch[target]
        output = output.astype(jnp.promote_types(output.dtype, jnp.float32))  # inner values are of the compute dtype
        losses = optax.softmax_cross_entropy_with_integer_labels(output, labels)
        return losses.mean(), {"accuracy": (output.argmax(-1) == labels).mean(dtype=jnp.float32)}

    def mse(output: Any, batch: Mapping[str, Any]) -> Any:
        return jnp.square(output - batch[target].reshape(output.shape).astype(output.dtype)).mean()

    if arguments.loss == "mse":
        return mse
    classes = data[target]
    if classes.dtype.kind not in "iu":
        raise CommandError(f"cross_entropy needs integer classes; {target!r} is {classes.dtype}")
    shape = {v.name: v.shape for v in (*model.graph.value_info.values(), *model.outputs)}.get(output)
    count = shape[-1] if shape and isinstance(shape[-1], int) else int(classes.max()) + 1
    if classes.min() < 0 or classes.max() >= count:
        raise CommandError(
            f"{target!r} has classes {classes.min()} to {classes.max()}; the output has classes 0 to {count - 1}"
        )
    return cross_entropy


def _data(path: Path) -> dict[str, np.ndarray]:
    data = load(path)
    if isinstance(data, np.ndarray):
        raise CommandError(f"{path} contains one unnamed array; np.savez(path, name=array) stores names")
    if not all(v.size for v in data.values()) or not data:
        raise CommandError(
            f"{path} contains no samples: {({n: v.shape for n, v in data.items()}) or 'it has no arrays'}"
        )
    extents = {n: len(v) if v.ndim else None for n, v in data.items()}
    if len(set(extents.values())) != 1 or not all(extents.values()):
        raise CommandError(f"the arrays of {path} differ in the number of samples along their first axes: {extents}")
    return data


def _samples(data: Mapping[str, np.ndarray]) -> int:
    return len(next(iter(data.values())))


def _epoch(
    step: Callable[..., Any],
    state: Any,
    data: Mapping[str, np.ndarray],
    size: int,
    seed: tuple[int, int],
    what: str,
    watch: LossWatch,
) -> tuple[Any, dict[str, float]]:
    """The state after an epoch, and the means of its metrics; its seed shuffles, so that resumed runs go on alike."""
    order = np.random.default_rng(seed).permutation(_samples(data))
    batches = order[: len(order) // size * size].reshape(-1, size)
    history = []
    with bar(None, len(batches)) as show, watch:
        for indices in batches:
            state, metrics = step(state, {n: v[indices] for n, v in data.items()})
            metrics = {n: v for n, v in metrics.items() if np.size(v) == 1 and jnp.issubdtype(v.dtype, jnp.floating)}
            show(metrics)
            watch(metrics)
            history.append(metrics)
    if not metrics:
        note(f"{what}: the training step returns no scalar metrics")
    return state, {n: float(np.mean([np.asarray(scalars[n], np.float64) for scalars in history])) for n in metrics}
