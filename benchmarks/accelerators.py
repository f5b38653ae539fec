"""What networks cost on a TPU and a GPU, compiled without one: writes docs/accelerators.md and docs/accelerators.json.

    python -m benchmarks.accelerators                    # every row; hours on two cores
    python -m benchmarks.accelerators --only vit --chip v5e
    python -m benchmarks.accelerators --check            # thirteen small rows against their limits; minutes

A row compiles a file under a caller's own ``jax.jit``, where weights are arguments, and the same network written by
hand in JAX, both for the same chip with the same options, in a process of its own. Counts are deterministic: bytes that
kernels read and write, kernels, temporary memory, and for a TPU the compiler's estimate of cycles. They compare two
programs; they are no times. The packages with XLA's compilers come with the extras ``tpu`` and ``cuda``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import jax

import onnx2jax
from onnx2jax import compat
from onnx2jax.model.devices import chips, hlo

from . import networks
from .networks import Make
from .networks.convolutional import wide_conv
from .networks.transformers import bert, vit
from .networks.vectors import svc, svr

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"
PAGE, KEPT = DOCS / "accelerators.md", DOCS / "accelerators.json"
CHIPS: Final = ("v5e", "h100")
BATCHES: Final = (8, 1)
SECONDS: Final = 600
"""A row that takes longer is given up, and says so."""
FAST: Final = -1.0
"""XLA's effort: a fifth to a twentieth of the time to compile, and worse programs, alike for both sides."""
MEASURES: Final = ("bytes", "cycles", "temporary")

NETWORKS: Final[Mapping[str, Make]] = {
    **{n: networks.NETWORKS[n] for n in ("mlp", "resnet50", "mobilenet_v2", "efficientnet", "unet")},
    "vit, 2 layers": partial(vit, layers=2),
    "bert, 2 layers": partial(bert, layers=2, vocabulary=1000),
    **{n: networks.NETWORKS[n] for n in ("gpt2_step", "lstm", "gru")},
    "wide_conv": wide_conv,
    "svr": svr,
    "svc": svc,
}

HEAD: Final = """Written by `make accelerators` without a TPU or GPU: XLA's compilers for both are Python packages.
Each row compiles an ONNX file under a caller's `jax.jit` of `model.apply`, with weights as arguments, and the same
network written by hand in JAX, for the same chip with the same options (`jax_exec_time_optimization_effort`
{effort}). Nothing is run: bytes read and written by kernels, temporary memory, and the TPU compiler's estimate of
cycles compare two programs; they are not times. A ratio is onnx2jax's count divided by that of the network by hand:
below 1, onnx2jax costs less; above 1.05 is bold. `simplified` compiles `model.simplified()`, whose BatchNormalization
and constants are folded into the weights, as in the network by hand. The last columns are the bytes of our
program, and the ratio to them of `convert(..., dtype="bfloat16")`, with bfloat16 inputs and KV caches."""


def packages() -> list[str]:
    """The packages with XLA's compilers that fit the jax that is installed."""
    from importlib.metadata import requires

    (libtpu,) = (r.partition(";")[0].strip() for r in requires("jax") or () if r.startswith("libtpu") and "tpu" in r)
    return [libtpu, *(f"jax-cuda12-{part}=={jax.__version__}" for part in ("plugin", "pjrt"))]


class Limit(NamedTuple):
    """The largest ratios of ours over by hand that ``--check`` allows; by hand is 1."""

    bytes: float = 1.05
    cycles: float = 1.05
    temporary: float = 1.05


CHECKED: Final[Mapping[tuple[str, str, int], Limit]] = {
    ("mlp", "v5e", 8): Limit(),
    ("mlp", "h100", 8): Limit(),
    ("vit, 2 layers", "v5e", 8): Limit(),
    ("bert, 2 layers", "v5e", 8): Limit(),
    ("bert, 2 layers", "h100", 8): Limit(),
    ("lstm", "v5e", 8): Limit(),
    ("lstm", "h100", 8): Limit(),
    ("gru", "v5e", 8): Limit(),
    ("gru", "h100", 8): Limit(),
    ("mobilenet_v2", "h100", 8): Limit(),
    ("wide_conv", "v5e", 1): Limit(cycles=0.15),
    ("svc", "v5e", 8): Limit(temporary=3.1),
    ("svc", "h100", 8): Limit(),
}


class Counted(NamedTuple):
    """What a program costs on one chip in a call."""

    bytes: int
    cycles: int
    temporary: int
    kernels: int
    flops: float


def counted(function: Any, arguments: Sequence[Any], chip: str) -> Counted:
    """The counts of a function compiled for a chip, from the types of its arguments."""
    sharding = jax.sharding.SingleDeviceSharding(chips.slice_of(chip).devices[0])

    def typed(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    compiled = jax.jit(function).lower(*jax.tree.map(typed, tuple(arguments))).compile()
    found = hlo.count(compiled.as_text() or "")
    memory: Any = compiled.memory_analysis()
    flops = compat.cost_analysis(compiled).get("flops", 0.0)
    return Counted(found.bytes, found.cycles, memory.temp_size_in_bytes, found.kernels, flops)


def row(name: str, chip: str, batch: int) -> dict[str, Any]:
    """One network: the counts of both programs."""
    with TemporaryDirectory() as folder:
        network = NETWORKS[name](Path(folder), batch)
        model = onnx2jax.convert(network.path)
        feeds = {n: jax.numpy.asarray(v) for n, v in network.feeds.items()}
        forms = {"ours": model, "simplified": model.simplified()}
        found = {n: _ours(m, feeds, chip) for n, m in forms.items()}
        found["bfloat16"] = _ours(*_in_bfloat16(network.path, feeds), chip)
        if network.by_hand is not None:
            hand = counted(network.by_hand, (network.params, *feeds.values()), chip)
            found["by hand"] = hand._asdict()
        return found


def _in_bfloat16(path: Path, feeds: Mapping[str, Any]) -> tuple[onnx2jax.Model, dict[str, Any]]:
    """The model computed in bfloat16 with its inputs, KV caches among inputs and outputs, as a Decoder keeps them."""
    outputs: Any = "compute" if any("past" in n for n in feeds) else "declared"
    model = onnx2jax.convert(path, dtype="bfloat16", outputs=outputs)
    return model, {n: v.astype("bfloat16") if v.dtype == "float32" else v for n, v in feeds.items()}


def _ours(model: onnx2jax.Model, feeds: Mapping[str, Any], chip: str) -> dict[str, Any]:
    return counted(lambda p, x: model.apply(p, **x), (dict(model.params), feeds), chip)._asdict()


def in_a_process(name: str, chip: str, batch: int, effort: float) -> dict[str, Any]:
    """A row, or why there is none; compilers of C++ hear no signals of Python's."""
    command = [sys.executable, "-m", "benchmarks.accelerators", "--row", name, chip, str(batch), f"--effort={effort}"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"more than {SECONDS} s to compile"}
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "Error:" in line]
        return {"failed": f"`{errors[-1][:200]}`" if errors else "XLA does not compile it"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def ratios(found: Mapping[str, Any], form: str = "simplified") -> dict[str, float]:
    """Ours, or another form of it, over by hand, where both are counted."""
    if "by hand" not in found:
        return {}
    ours, hand = found[form], found["by hand"]
    return {m: ours[m] / hand[m] for m in (*MEASURES, "kernels") if hand[m] and ours[m]}


def check(effort: float) -> int:
    """The number of rows above their limits."""
    above = 0
    for (name, chip, batch), limit in CHECKED.items():
        found = in_a_process(name, chip, batch, effort)
        ratio = ratios(found)
        high = [m for m in MEASURES if ratio.get(m, 0.0) > getattr(limit, m)]
        above += bool(high) or not ratio
        said = ", ".join(f"{m} {r:.2f}" for m, r in ratio.items()) or found.get("failed", "nothing by hand")
        print(f"{name:16} {chip:5} batch {batch}: {said}{f'   above: {high}' if high else ''}", flush=True)
    return above


def lines(rows: Mapping[str, Mapping[str, Any]], effort: float) -> Iterator[str]:
    """The page."""
    yield "# On a TPU and a GPU, counted"
    yield ""
    yield HEAD.format(effort=f"{effort:g}")
    yield ""
    yield f"jax {jax.__version__}; peaks of the chips as in `onnx2jax plan --for`."
    for chip in CHIPS:
        yield from ("", f"## {chips.CHIPS[chip].title}", "")
        simplified = " | ".join(f"{m}, simplified" for m in MEASURES)
        yield f"| network | batch | {' | '.join(MEASURES)} | {simplified} | MB | bfloat16 |"
        yield f"|{'---|' * (4 + 2 * len(MEASURES))}"
        for key, found in rows.items():
            name, of, batch = key.split("; ")
            if of != chip:
                continue
            if "failed" in found:
                yield f"| {name} | {batch} | {found['failed']} |{' |' * (1 + 2 * len(MEASURES))}"
                continue
            cells = [_cell(ratios(found, form).get(m)) for form in ("ours", "simplified") for m in MEASURES]
            moved = found["ours"]["bytes"]
            half = f"{found['bfloat16']['bytes'] / moved:.2f}" if "bfloat16" in found else "-"
            yield f"| {name} | {batch} | {' | '.join(cells)} | {moved / 1e6:.1f} | {half} |"


def _cell(ratio: float | None) -> str:
    """A ratio, bold above 1.05."""
    if ratio is None:
        return "-"
    return f"**{ratio:.2f}**" if ratio > 1.05 else f"{ratio:.2f}"


def main(given: list[str] | None = None) -> int:
    """Measure rows, and write the page; with ``--check`` the number of rows above their limits."""
    parser = argparse.ArgumentParser("python -m benchmarks.accelerators", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="networks whose name contains it")
    parser.add_argument("--chip", action="append", choices=CHIPS, help="these alone")
    parser.add_argument("--check", action="store_true", help="the small rows against their limits")
    parser.add_argument("--effort", type=float, default=FAST, help="XLA's, from -1 to 1 (default: %(default)s)")
    parser.add_argument("--packages", action="store_true", help="name those with XLA's compilers, for this jax")
    parser.add_argument("--row", nargs=3, metavar=("NETWORK", "CHIP", "BATCH"), help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.packages:
        print(*packages())
        return 0
    if options.row:
        jax.config.update("jax_exec_time_optimization_effort", options.effort)
        name, chip, batch = options.row
        print(json.dumps(row(name, chip, int(batch))))
        return 0
    if options.check:
        return check(options.effort)
    rows = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for batch in BATCHES:
        for name in NETWORKS:
            for chip in options.chip or CHIPS:
                if not options.only or any(o in name for o in options.only):
                    found = rows[f"{name}; {chip}; {batch}"] = in_a_process(name, chip, batch, options.effort)
                    print(name, chip, batch, ratios(found) or found.get("failed", ""), flush=True)
                    order = sorted(rows, key=lambda k: (list(NETWORKS).index(k.split("; ")[0]), k))
                    KEPT.write_text(json.dumps({k: rows[k] for k in order}, indent=1) + "\n")
    PAGE.write_text("\n".join(lines(json.loads(KEPT.read_text()), options.effort)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
