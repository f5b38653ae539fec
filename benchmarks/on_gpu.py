"""Times networks, training steps and decoders on this machine's GPU, beside JAX by hand and PyTorch: docs/gpu.json.

    python -m benchmarks.on_gpu [--only vit] [--json FILE]

Needs jax for CUDA, and PyTorch for its columns. Inputs and results stay on the device, in float32 (with products in
TF32, JAX's default on a GPU, allowed in PyTorch) and bfloat16. Child processes compile all cases at the same time, then
time them in turn: many calls in a row before they wait for the last.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import numpy as np

from .gpu_report import KEPT, TORCH
from .harness import Call, compare, median
from .machine import machine
from .networks import NETWORKS, Network

TIMED: Final = ("mlp", "resnet50", "mobilenet_v2", "efficientnet", "unet", "vit", "bert", "gpt2", "gpt2_step", "lstm")
TRAINED: Final = ("resnet50", "mobilenet_v2", "vit", "bert")
DTYPES: Final = ("bfloat16", "float32")
GRACE: Final = 120
"""Seconds after which a child that has not stopped compiling is killed."""
PROCESSES: Final = {"networks": 3, "training": 2, "decoders": 1, "torch": 4}
"""Child processes of each kind, which share its cases: one traces one program at a time."""
ROUNDS, BLOCK = 5, 0.05

Calls = Mapping[str, Call]


class Case(NamedTuple):
    """A network in an element type, and its batch: in the order in which they are compiled."""

    name: str
    dtype: str
    batch: int

    def __str__(self) -> str:
        return "; ".join(map(str, self))


def cases(names: Sequence[str], only: Sequence[str]) -> list[Case]:
    chosen = [n for n in names if not only or n in only]
    return [Case(n, t, 8) for t, n in product(DTYPES, chosen)] + [Case(n, "float32", 1) for n in chosen]


# ------------------------------------------------------------------------------------------------ what is timed


def network_calls(case: Case, folder: Path) -> Calls:
    """A call of the model, the model in a caller's jit, and by hand."""
    import jax

    network, feeds, params = _made(case, folder)
    model, simple = _converted(network.path, case.dtype), _simplified(network.path, case.dtype)
    ours = jax.jit(lambda p, x: simple.apply(p, **x))
    weights = jax.device_put(dict(simple.params))
    assert network.by_hand is not None
    hand = jax.jit(network.by_hand)
    return {
        "onnx2jax": lambda: model(**feeds),
        "in a jit": lambda: ours(weights, feeds),
        "by hand": lambda: hand(params, *feeds.values()),
    }


def training_calls(case: Case, folder: Path) -> Calls:
    """The gradient of half the sum of squares of the first output by all weights, ours and by hand."""
    import jax

    from .chip_rows import gradient

    network, feeds, params = _made(case, folder)
    model = _simplified(network.path, case.dtype)
    weights = jax.device_put(dict(model.params))
    ours = jax.jit(gradient(lambda p, x: model.apply(p, **x)))
    assert network.by_hand is not None
    by_hand = network.by_hand
    hand = jax.jit(gradient(lambda p, x: by_hand(p, *x.values())))
    return {"onnx2jax": lambda: ours(weights, feeds), "by hand": lambda: hand(params, feeds)}


def _made(case: Case, folder: Path) -> tuple[Network, dict[str, Any], Any]:
    """A case's network, and on the device its inputs, in the order in which by hand takes them, and parameters."""
    network = NETWORKS[case.name](folder, case.batch)
    feeds = {n: _cast(v, case.dtype) for n, v in network.feeds.items()}
    return network, feeds, _cast(network.params, case.dtype)


def _simplified(path: Path, dtype: str) -> Any:
    """With BatchNormalization folded, as by hand."""
    import onnx2jax

    simplified = path.with_name("simplified.onnx")
    onnx2jax.save(onnx2jax.convert(path).simplified(merge_products=True), simplified)
    return _converted(simplified, dtype)


def _converted(path: Path, dtype: str) -> Any:
    import onnx2jax

    return onnx2jax.convert(path, dtype=None if dtype == "float32" else dtype, outputs="compute")


def _cast(tree: Any, dtype: str) -> Any:
    """On the device, floating-point leaves in the type."""
    import jax
    import jax.numpy as jnp

    def cast(x: Any) -> Any:
        x = jnp.asarray(x)
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree)


def torch_calls(case: Case, folder: Path) -> Calls:
    """torch.compile with CUDA graphs; empty if an operator is missing."""
    import torch

    from . import in_torch

    network = NETWORKS[case.name](folder, case.batch)
    found = in_torch.function(network, case.dtype)
    if found is None:
        return {}
    function, arrays = found
    kind = getattr(torch, case.dtype)

    def placed(x: Any) -> Any:
        x = x.to("cuda")
        return x.to(kind) if x.is_floating_point() else x

    weights = {n: placed(v) for n, v in arrays.items()}
    given = [placed(torch.from_numpy(np.asarray(v))) for v in network.feeds.values()]
    for tensor in (*weights.values(), *given):
        torch._dynamo.mark_static_address(tensor)  # CUDA graphs read them where they are

    run = torch.compile(function, mode="reduce-overhead")

    def call() -> Any:
        with torch.inference_mode():
            return run(weights, *given)

    return {TORCH[0]: call}


# --------------------------------------------------------------------------------------------- child processes


def child(kind: str, number: int, only: Sequence[str], end: float) -> None:
    """Compile what it can before ``end``, wait for a line on stdin, then print a line of JSON for each case."""
    chosen = cases(TRAINED if kind == "training" else TIMED, only)
    if kind == "training":
        chosen = [c for c in chosen if c.batch > 1]
    chosen = chosen[number :: PROCESSES[kind]]
    with TemporaryDirectory() as place:
        if kind == "decoders":
            _decoders(Path(place), end)
        elif kind == "torch":
            _in_torch(chosen, Path(place), end)
        else:
            _in_jax(kind, chosen, Path(place), end)


def _in_jax(kind: str, chosen: Sequence[Case], place: Path, end: float) -> None:
    import jax

    from .rivals import difference

    make = network_calls if kind == "networks" else training_calls

    def compiled(case: Case) -> tuple[Calls, float] | None:
        try:
            calls = make(case, _folder(place, case))
            results = {n: jax.tree.leaves(jax.block_until_ready(call())) for n, call in calls.items()}
            said("compiled", case)
        except Exception:
            said(case, traceback.format_exc())
            return None
        if kind == "training":  # gradients are by weights of other arrangements
            return calls, float("nan")
        return calls, difference(*(_cast(results[n], "float32") for n in ("onnx2jax", "by hand")))

    pool = ThreadPoolExecutor(5)
    futures = {case: pool.submit(compiled, case) for case in chosen}
    wait(futures.values(), timeout=end - time.monotonic())
    pool.shutdown(cancel_futures=True)
    await_turn()
    for case, future in futures.items():
        if not future.cancelled() and (found := future.result()) is not None:
            calls, worst = found
            report(kind, str(case), milliseconds(calls, jax.block_until_ready) | {"differs": worst})


def _folder(place: Path, case: Case) -> Path:
    folder = place / str(case).replace("; ", "-")
    folder.mkdir()
    return folder


def _in_torch(chosen: Sequence[Case], place: Path, end: float) -> None:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1000
    ready = {}
    for case in chosen:
        if time.monotonic() > end:
            break
        calls = {}
        for name, call in torch_calls(case, _folder(place, case)).items():
            try:
                for _ in range(3):  # CUDA graphs are recorded by the second call
                    call()
                torch.cuda.synchronize()
                calls[name] = call
            except Exception:
                said(case, name, traceback.format_exc())
        said("compiled", case)
        ready[case] = calls
    await_turn()
    for case, calls in ready.items():
        if calls:
            report("networks", str(case), milliseconds(calls, lambda _: torch.cuda.synchronize()))


def _decoders(place: Path, end: float) -> None:
    import jax

    import onnx2jax

    from .decoders import SIZES, write

    tokens, ready = 128, []
    for size, bits in product(("125m", "1.1b"), (4, 0)):
        if (size, bits) == ("1.1b", 0) or time.monotonic() > end:
            continue  # the first has gigabytes of random numbers
        folder = place / f"{size}-{bits}"
        write(folder, SIZES[size], bits)
        decoder = onnx2jax.decoder(folder, dtype="bfloat16")
        held = sum(v.size * v.dtype.itemsize for v in jax.tree.leaves(dict(decoder.params)))
        for batch in (1, 8):
            prompts = np.random.default_rng(1).integers(2, 31_000, (batch, 32))

            def generate(count: int, decoder: Any = decoder, prompts: Any = prompts) -> Any:
                return decoder.generate(prompts, count, stop=(), length=32 + tokens).tokens

            try:
                for count in (tokens, 1):
                    generate(count)
                ready.append((f"{size}, {'int4' if bits else 'bfloat16'}; {batch}", batch, held, generate))
                said("compiled decoder", ready[-1][0])
            except Exception:
                said(size, bits, batch, traceback.format_exc())
    await_turn()
    for name, batch, held, generate in ready:
        whole, first = (median(partial(generate, count), 5) for count in (tokens, 1))
        step = (whole - first) / (tokens - 1)
        found = {"step": step * 1e3, "first": first * 1e3, "tokens": batch * tokens / whole, "held": held}
        report("decoders", name, found)


def milliseconds(calls: Calls, settle: Callable[[Any], Any]) -> dict[str, float]:
    """Medians by contestant."""
    compared = compare(calls, rounds=ROUNDS, block=BLOCK, discard=BLOCK / 2, settle=settle)
    return {name: timing.median * 1e3 for name, timing in compared.timings.items()}


def said(*words: object) -> None:
    print(*words, file=sys.stderr, flush=True)


def await_turn() -> None:
    print("ready", flush=True)
    sys.stdin.readline()


def report(section: str, name: str, found: Mapping[str, Any]) -> None:
    print(json.dumps([section, name, found]), flush=True)


# ------------------------------------------------------------------------------------------------------ parent


def children(kinds: Sequence[str], only: Sequence[str], patience: float) -> Iterator[tuple[str, str, dict[str, float]]]:
    """What the children report: each times its calls after all have compiled theirs."""
    env = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "benchmarks.on_gpu", f"--patience={patience}", *(f"--only={n}" for n in only)]
    started = {
        (kind, number): subprocess.Popen(
            [*command, "--child", kind, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**env, "JAX_PLATFORMS": "cpu"} if kind == "torch" else env,
        )
        for kind in kinds
        for number in range(PROCESSES[kind])
    }
    end = time.monotonic() + patience + GRACE
    for kind, process in started.items():
        assert process.stdout is not None
        reads, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
        if not reads or process.stdout.readline() != "ready\n":
            said(*kind, "is not ready: given up")
            process.kill()
    for process in started.values():
        output, _ = process.communicate("go\n" if process.poll() is None else None)
        yield from map(json.loads, output.splitlines())


def device() -> str:
    """The GPU's name, as its driver has it."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except FileNotFoundError:
        return "no GPU"


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.on_gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", default=[], choices=TIMED, help="these networks alone")
    parser.add_argument("--kind", action="append", choices=PROCESSES, help="these children alone")
    parser.add_argument("--json", type=Path, default=KEPT, help="file to write (default: %(default)s)")
    parser.add_argument(
        "--patience",
        type=float,
        default=1200,
        help="seconds to compile in; what is not compiled by then is left out (default: %(default)s)",
    )
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.child:
        kind, number = options.child
        child(kind, int(number), options.only, time.monotonic() + options.patience)
        return
    kept: dict[str, Any] = {"device": device()}
    kept |= {name: version for name, version in machine()["versions"].items() if name in ("jax", "torch")}
    runs = json.loads(options.json.read_text()) if options.json.exists() else []
    others = [run for run in runs if run["device"] != kept["device"]]
    for section, name, found in children(options.kind or tuple(PROCESSES), options.only, options.patience):
        print(section, name, {n: round(v, 4) for n, v in found.items()}, flush=True)
        kept.setdefault(section, {}).setdefault(name, {}).update(found)
        options.json.write_text(json.dumps([kept, *others], indent=1) + "\n")


if __name__ == "__main__":
    main()
