"""The groups of ``benchmarks.bench``: each yields rows, names with a function that measures them when selected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

import onnx2jax

from . import calls, harness, in_torch, models, networks, operators, sizes, startup
from .harness import Call
from .rivals import ORT, OURS, Mismatch, checked, rivals, session

Row = dict[str, Any]
Rows = Iterator[tuple[str, Callable[[], Row]]]
BATCHES: Final = (1, 8)
TOLERANCE: Final = 1e-3
"""Tolerance of real models, whose weights are not scaled for comparison."""
COARSE: Final = 0.05
"""Tolerance of models with 8- or 16-bit weights, whose intermediate roundings depend on the runtime."""


@dataclass(frozen=True)
class Settings:
    """The command's options.

    Attributes:
        paths: real models: files, and folders of them.
        rounds: number of blocks for each rival.
        repeats: number of processes for each start-up and memory row.
        torch: whether to measure PyTorch, if it is installed.
    """

    paths: tuple[Path, ...] = ()
    rounds: int = harness.ROUNDS
    repeats: int = 3
    torch: bool = True

    def compared(self, found: Mapping[str, Call]) -> Row:
        """The row that compares these calls."""
        return harness.compare(found, rounds=self.rounds).to_json(OURS)


def real(settings: Settings) -> Rows:
    """Real models: the ones named, the light ones of the onnx package, those in installed packages."""
    for name, path in (*models.found(settings.paths), *models.in_packages(), *models.shipped()):
        yield name, partial(_real, settings, name, path)


def _real(settings: Settings, name: str, path: Path) -> Row:
    model = onnx2jax.convert(path)
    feeds = models.inputs(path, model)
    runs = {OURS: partial(model.run, None, feeds), ORT: partial(session(path).run, None, feeds)}
    coarse = any(v.dtype.itemsize < 4 and v.dtype != bool for v in model.params.values())
    try:
        checked(runs, COARSE if coarse else TOLERANCE, name)
    except Mismatch:
        # A value between two 8-bit steps is rounded by the last bit of a sum, and hundreds of roundings
        # change the output. Then each node must agree on equal operands.
        found = model.verify(feeds, against=ORT, each_node=True).nodes.values() if coarse else ()
        if not found or not all(c.ok for nodes in found for c in nodes):
            raise
    return settings.compared(runs)


def synthetic(settings: Settings) -> Rows:
    """The synthetic networks at both batch sizes."""
    for batch in BATCHES:
        for name, make in networks.NETWORKS.items():
            yield f"{name}, batch {batch}", partial(_network, settings, make, batch)


def _network(settings: Settings, make: networks.Make, batch: int) -> Row:
    with TemporaryDirectory() as folder:
        network = make(Path(folder), batch)
        found = rivals(network)
        if settings.torch:
            found |= in_torch.rivals(network)
        return settings.compared(found)


def single(settings: Settings) -> Rows:
    """Single operators."""
    for operator in operators.OPERATORS:
        yield operator.name, partial(_network, settings, partial(operators.network, operator), 1)
    for name, make in operators.RECURRENT.items():
        yield name, partial(_network, settings, make, 1)


def called(settings: Settings) -> Rows:
    """Calls dominated by overhead."""
    yield "MLP 784-128-10", partial(_called, settings, calls.mlp)
    for count in calls.WEIGHTS:
        yield f"{count} weights of 4 numbers", partial(_called, settings, partial(calls.sums, weights=count))


def _called(settings: Settings, make: Callable[[Path], Mapping[str, Call]]) -> Row:
    with TemporaryDirectory() as folder:
        return settings.compared(make(Path(folder)))


READY: Final = ("mlp", "resnet50", "mobilenet_v2", "unet", "bert", "gpt2_step", "lstm", "int8_qdq")
"""Networks whose start-up and memory are measured, in addition to the real models named."""


def ready(settings: Settings) -> Rows:
    """Seconds and peak bytes of processes from the file to the first result."""
    for name, path in models.found(settings.paths):
        yield name, partial(_of_model, settings, _ready, path)
    for name in READY:
        yield f"{name}, batch 1", partial(_of_network, settings, _ready, networks.NETWORKS[name])


Measure = Callable[[Settings, Path, Mapping[str, np.ndarray]], Row]


def _of_network(settings: Settings, measure: Measure, make: networks.Make) -> Row:
    with TemporaryDirectory() as folder:
        network = make(Path(folder), 1)
        return measure(settings, network.path, network.feeds)


def _of_model(settings: Settings, measure: Measure, path: Path) -> Row:
    return measure(settings, path, models.inputs(path, onnx2jax.convert(path)))


def _ready(settings: Settings, path: Path, feeds: Mapping[str, np.ndarray]) -> Row:
    with TemporaryDirectory() as folder:
        inputs, cache = Path(folder) / "inputs.npz", Path(folder) / "cache"
        np.savez(inputs, allow_pickle=False, **feeds)
        cache.mkdir()
        cold = startup.measured("ours", path, inputs, settings.repeats)
        startup.measured("ours", path, inputs, 1, cache)  # fills it
        cached = startup.measured("ours", path, inputs, settings.repeats, cache)
        background = startup.measured("background", path, inputs, settings.repeats)
        theirs = startup.measured("onnxruntime", path, inputs, settings.repeats)
    needed = cold["weights"] + models.live_bytes(path)
    return {
        "ready": {
            OURS: cold,
            f"{OURS}, from its cache": cached,
            f"{OURS}, background_compile": background,
            ORT: theirs,
        },
        "memory": {
            "weights": cold["weights"],
            "weights and activations": needed,
            OURS: cold["peak"] - cold["before"],
            ORT: theirs["peak"] - theirs["before"],
        },
    }


WHOLE: Final = ("bert", "resnet50", "gpt2_step")
"""Networks whose whole processes are measured, in addition to these real models, where they are named."""
WHOLE_MODELS: Final = ("yolox_nano", "minilm_ortfused", "xgb_digits")


def processes(settings: Settings) -> Rows:
    """Seconds of a process from the start of Python to the first result: the first one, and later ones."""
    for name, path in models.found(settings.paths):
        if name in WHOLE_MODELS:
            yield name, partial(_of_model, settings, _process, path)
    for name in WHOLE:
        yield f"{name}, batch 1", partial(_of_network, settings, _process, networks.NETWORKS[name])


def _process(settings: Settings, path: Path, feeds: Mapping[str, np.ndarray]) -> Row:
    """Medians of ``repeats`` processes; each first one has a cache of its own, which is empty."""
    kinds, seconds = {"first": "ours", "later": "ours", ORT: "onnxruntime"}, dict[str, list[float]]()
    with TemporaryDirectory() as folder:
        inputs = Path(folder) / "inputs.npz"
        np.savez(inputs, allow_pickle=False, **feeds)
        for k in range(settings.repeats):
            for name, kind in kinds.items():
                seconds.setdefault(name, []).append(startup.whole(kind, path, inputs, Path(folder) / f"cache{k}"))
    return {"processes": {kind: float(np.median(each)) for kind, each in seconds.items()}}


def sized(settings: Settings) -> Rows:  # noqa: ARG001  (one process each: they take minutes)
    """Seconds and peak bytes of files of growing size, onnxruntime's beside ours."""
    for name, make in sizes.SIZES.items():
        yield name, partial(_sized, make)


def _sized(make: Callable[[Path], networks.Network]) -> Row:
    with TemporaryDirectory() as folder:
        network, inputs = make(Path(folder)), Path(folder) / "inputs.npz"
        np.savez(inputs, allow_pickle=False, **network.feeds)
        kinds = {OURS: "ours", ORT: "onnxruntime"}
        return {"sizes": {name: startup.measured(kind, network.path, inputs, 1) for name, kind in kinds.items()}}


GROUPS: Final[dict[str, Callable[[Settings], Rows]]] = {
    "models": real,
    "networks": synthetic,
    "operators": single,
    "calls": called,
    "ready": ready,
    "processes": processes,
    "sizes": sized,
}
