"""What networks cost on a TPU and a GPU, compiled without one: writes docs/accelerators.md and docs/accelerators.json.

    python -m benchmarks.accelerators [MODELS]            # every row; hours on two cores
    python -m benchmarks.accelerators --only vit --chip v5e
    python -m benchmarks.accelerators --section decoders
    python -m benchmarks.accelerators --check            # nineteen small rows against their limits; minutes

Sections are networks, training steps, decoders, shardings, and the files of the folders MODELS. A row of a network
compiles a file under a caller's own ``jax.jit``, where weights are arguments, and the same network written by
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
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax

from onnx2jax.model.devices import chips

from . import chip_rows, gpu_report, models, networks
from .chip_reasons import REASONS
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
MOST_RATIO: Final = 1.05
MOST_SECONDS: Final = 60
"""What is more is bold, and has its reason."""
MB: Final = 1e6

NETWORKS: Final[Mapping[str, Make]] = {
    **{n: networks.NETWORKS[n] for n in ("mlp", "resnet50", "mobilenet_v2", "efficientnet", "unet")},
    "vit, 2 layers": partial(vit, layers=2),
    "bert, 2 layers": partial(bert, layers=2, vocabulary=1000),
    **{n: networks.NETWORKS[n] for n in ("gpt2_step", "lstm", "gru")},
    "wide_conv": wide_conv,
    "svr": svr,
    "svc": svc,
}

TRAINED: Final = ("mlp", "resnet50", "mobilenet_v2", "vit, 2 layers", "bert, 2 layers", "lstm")

HEAD: Final = """Written by `make accelerators`. Counting needs no TPU or GPU: XLA's compilers for both are packages.
Every counted program is compiled with `jax_exec_time_optimization_effort` {effort}, and not run: bytes read and written
by kernels, temporary memory, and the TPU compiler's estimate of cycles compare two programs; they are not times. A
ratio is onnx2jax's count divided by that of the same network by hand in JAX: below 1, onnx2jax costs less; above 1.05
is bold. For a GPU, the products of networks and training steps are cuBLAS's on both sides, and those of other programs
where XLA, without a GPU to tune on, finds no tiles for one.

jax {jax}; peaks of the chips as in `onnx2jax plan --for`."""


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
    ("lstm", "h100", 8): Limit(temporary=1.4),  # a workspace of cuBLAS
    ("gru", "v5e", 8): Limit(),
    ("gru", "h100", 8): Limit(temporary=1.4),
    ("mobilenet_v2", "h100", 8): Limit(),
    ("gpt2_step", "v5e", 8): Limit(),
    ("wide_conv", "v5e", 1): Limit(cycles=0.15),
    ("svc", "v5e", 8): Limit(temporary=3.1),
    ("svc", "h100", 8): Limit(),
}


CHECKED_DECODERS: Final[Mapping[tuple[str, str, int], float]] = {
    ("bfloat16, prefill", "v5e", 8): 4.7,
    ("bfloat16, prefill", "h100", 8): 5.5,
    ("bfloat16, step", "v5e", 1): 0.7,
    ("int4 weights, step", "v5e", 1): 0.45,
    ("int4 weights, step", "h100", 8): 2.6,  # 0.25 of them select the values of V that are read
}
"""The largest bytes moved by a call over bytes held that ``--check`` allows; embeddings are held, and a row read."""


class Row(NamedTuple):
    """What is compiled: in a section, under a name, for a chip; ``number`` is the batch, or that of the chips."""

    section: str
    name: str
    chip: str
    number: int

    @property
    def key(self) -> str:
        name = self.name
        if self.section == "files":
            ((name, _),) = models.found([Path(name)])
        return f"{name}; {self.chip}; {self.number}"

    def counts(self) -> dict[str, Any]:
        """The counts; none where a file is no single program."""
        name, chip, number = self.name, self.chip, self.number
        first, _, second = name.rpartition(", ")
        match self.section:
            case "networks":
                return chip_rows.network_call(NETWORKS[name], chip, number)
            case "training":
                return chip_rows.training_step(NETWORKS[name], chip, number)
            case "decoders":
                return chip_rows.decoder_call(chip_rows.DECODERS[first], second, chip, number)
            case "shardings":
                return chip_rows.sharded_call(chip_rows.SHARDED[first], second, number, chip)
            case _:
                return chip_rows.file_call(Path(name), chip)


SECTIONS: Final = ("networks", "training", "decoders", "shardings", "files")


def rows(section: str, paths: Sequence[Path]) -> Iterator[tuple[str, int]]:
    """The names and numbers of a section's rows, in the order of the page."""
    match section:
        case "networks":
            yield from product(NETWORKS, BATCHES)
        case "training":
            yield from product(TRAINED, (8,))
        case "decoders":
            yield from product(map(", ".join, product(chip_rows.DECODERS, chip_rows.CALLS)), (1, 8))
        case "shardings":
            yield from product(map(", ".join, product(chip_rows.SHARDED, chip_rows.PLANS)), (4, 8))
        case _:
            yield from ((str(path), 1) for _, path in models.found(paths))


def in_a_process(row: Row, effort: float) -> dict[str, Any]:
    """A row, or why there is none; compilers of C++ hear no signals of Python's."""
    command = [sys.executable, "-m", "benchmarks.accelerators", "--row", *map(str, row), f"--effort={effort}"]
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
    ours, hand = found.get(form, found["ours"]), found["by hand"]
    return {m: ours[m] / hand[m] for m in (*MEASURES, "kernels") if hand[m] and ours[m]}


def check(effort: float) -> int:
    """The number of rows above their limits, those of networks and of decoders."""
    above = 0
    for (name, chip, batch), limit in CHECKED.items():
        found = in_a_process(Row("networks", name, chip, batch), effort)
        ratio = ratios(found)
        high = [m for m in MEASURES if ratio.get(m, 0.0) > getattr(limit, m)]
        above += bool(high) or not ratio
        said = ", ".join(f"{m} {r:.2f}" for m, r in ratio.items()) or found.get("failed", "nothing by hand")
        print(f"{name:16} {chip:5} batch {batch}: {said}{f'   above: {high}' if high else ''}", flush=True)
    for (name, chip, batch), most in CHECKED_DECODERS.items():
        found = in_a_process(Row("decoders", name, chip, batch), effort)
        moved = found["bytes"] / found["held"] if "bytes" in found else float("inf")
        above += moved > most
        said = f"moved / held {moved:.2f}{f'   above: {most}' if moved > most else ''}"
        print(f"{name:16} {chip:5} batch {batch}: {found.get('failed', said)}", flush=True)
    return above


Cells = Callable[[Mapping[str, Any]], list[str]]


class Table(NamedTuple):
    """How a section is shown: its title, what it says, columns after the name, their cells, and what is too much."""

    title: str
    text: str
    columns: Sequence[str]
    cells: Cells
    limit: str = f"{MOST_RATIO}"


def _of_network(found: Mapping[str, Any]) -> list[str]:
    moved = found["ours"]["bytes"]
    half = f"{found['bfloat16']['bytes'] / moved:.2f}" if "bfloat16" in found else "-"
    forms = [_ratio(ratios(found, form).get(m)) for form in ("ours", "simplified") for m in MEASURES]
    return [*forms, f"{moved / MB:.1f}", half]


def _of_training(found: Mapping[str, Any]) -> list[str]:
    forms = [_ratio(ratios(found, form).get(m)) for form in ("ours", "simplified") for m in MEASURES]
    return [*forms, f"{found['ours']['bytes'] / MB:.1f}"]


def _of_decoder(found: Mapping[str, Any]) -> list[str]:
    held, moved = found["held"], found["bytes"]
    return [f"{held / MB:.1f}", f"{moved / MB:.1f}", f"{moved / held:.2f}", *_counts(found)]


def _of_sharding(found: Mapping[str, Any]) -> list[str]:
    sizes = (f"{found[n] / MB:.1f}" if found[n] is not None else "-" for n in ("weights", "needed", "bytes", "sent"))
    return [*sizes, str(found["collectives"]), f"{found['cycles'] / 1e3:,.0f}" if found["cycles"] else "-"]


def _of_file(found: Mapping[str, Any]) -> list[str]:
    seconds = found["seconds"]
    slow = f"**{seconds:.0f}**" if seconds > MOST_SECONDS else f"{seconds:.0f}"
    return [f"{found['bytes'] / MB:.1f}", *_counts(found), slow]


def _counts(found: Mapping[str, Any]) -> list[str]:
    cycles = f"{found['cycles'] / 1e3:,.0f}" if found["cycles"] else "-"
    return [f"{found['temporary'] / MB:.1f}", cycles, str(found["kernels"])]


TABLES: Final = {
    "networks": Table(
        "Calls of networks",
        "An ONNX file under a caller's `jax.jit` of `model.apply`, with weights as arguments. `simplified` compiles "
        "`model.simplified(merge_products=True)`, whose BatchNormalization and constants are folded into the weights, "
        "and whose query, key and value are one product, as by hand. MB are "
        'the bytes of our program, and the last column the ratio to them of `convert(..., dtype="bfloat16")`, with '
        "bfloat16 inputs and KV caches.",
        ["batch", *MEASURES, *(f"{m}, simplified" for m in MEASURES), "MB", "bfloat16"],
        _of_network,
    ),
    "training": Table(
        "Training steps",
        "The gradient of half the sum of squares of the first output by all floating-point weights but scalars. By "
        "hand, the BatchNormalization of convolutional networks is folded into the weights beforehand, as in "
        "`simplified`; ours differentiates it.",
        ["batch", *MEASURES, *(f"{m}, simplified" for m in MEASURES), "MB"],
        _of_training,
    ),
    "decoders": Table(
        "Decoders",
        f"Two layers of width {chip_rows.DECODER.hidden}, {chip_rows.DECODER.heads} heads over "
        f"{chip_rows.DECODER.kv_heads}, {chip_rows.DECODER.vocabulary} tokens, as onnxruntime-genai's builder writes "
        f"them: a prompt of {chip_rows.PROMPT} tokens, a step over {chip_rows.SLOTS} slots, and a loop of "
        f"{chip_rows.TOKENS} greedy steps. Caches are donated. Held are weights and caches; "
        "moved over held is 1 where each is read once, less where only rows of the embedding are.",
        ["batch", "held, MB", "moved, MB", "moved / held", "temporary, MB", "1000 cycles", "kernels"],
        _of_decoder,
    ),
    "shardings": Table(
        "Several chips",
        "Eight rows on 4 and 8 chips, per chip: `shardings=` tensor or fsdp, or pipeline stages (the busiest one).",
        ["chips", "weights, MB", "needed, MB", "moved, MB", "sent, MB", "collectives", "1000 cycles"],
        _of_sharding,
    ),
    "files": Table(
        "Real files",
        f"Those that are one program, with the inputs beside them. Seconds of processor time to compile above "
        f"{MOST_SECONDS} are bold.",
        ["batch", "moved, MB", "temporary, MB", "1000 cycles", "kernels", "seconds"],
        _of_file,
        f"{MOST_SECONDS} s",
    ),
}


def lines(kept: Mapping[str, Mapping[str, Any]], effort: float) -> Iterator[str]:
    """The page."""
    yield from ("# On a TPU and a GPU", "", HEAD.format(effort=f"{effort:g}", jax=jax.__version__))
    if gpu_report.KEPT.exists():
        yield from gpu_report.lines(json.loads(gpu_report.KEPT.read_text()))
    for section, table in TABLES.items():
        found = kept.get(section, {})
        if not found:
            continue
        yield from ("", f"## {table.title}", "", *textwrap.wrap(table.text, 120))
        for chip in CHIPS:
            yield from ("", f"### {table.title}: {chips.CHIPS[chip].title}", "")
            yield f"| | {' | '.join(table.columns)} |"
            yield f"|{'---|' * (1 + len(table.columns))}"
            for key, row in found.items():
                name, of, number = key.split("; ")
                if of == chip:
                    cells = [row["failed"], *[""] * (len(table.columns) - 2)] if "failed" in row else table.cells(row)
                    yield f"| {name} | {number} | {' | '.join(cells)} |"
            if reasons := REASONS.get((section, chip)):
                yield from ("", f"Above {table.limit}:", "", *reasons.strip().splitlines())


def _ratio(ratio: float | None) -> str:
    """A ratio, bold above 1.05."""
    if ratio is None:
        return "-"
    return f"**{ratio:.2f}**" if ratio > MOST_RATIO else f"{ratio:.2f}"


def main(given: list[str] | None = None) -> int:
    """Measure rows, and write the page; with ``--check`` the number of rows above their limits."""
    parser = argparse.ArgumentParser("python -m benchmarks.accelerators", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("paths", nargs="*", type=Path, metavar="MODELS", help="folders of real models, for a section")
    parser.add_argument("--section", action="append", choices=SECTIONS, help="these alone")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="rows whose name contains it")
    parser.add_argument("--chip", action="append", choices=CHIPS, help="these alone")
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="the small rows against their limits")
    parser.add_argument("--effort", type=float, default=FAST, help="XLA's, from -1 to 1 (default: %(default)s)")
    parser.add_argument("--packages", action="store_true", help="name those with XLA's compilers, for this jax")
    parser.add_argument("--row", nargs=4, metavar=("SECTION", "NAME", "CHIP", "NUMBER"), help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.packages:
        print(*packages())
        return 0
    if options.row:
        jax.config.update("jax_exec_time_optimization_effort", options.effort)
        section, name, chip, number = options.row
        print(json.dumps(Row(section, name, chip, int(number)).counts()))
        return 0
    if options.check:
        return check(options.effort)
    with ThreadPoolExecutor(options.jobs) as pool:
        for section in options.section or SECTIONS:
            chosen = [
                Row(section, name, chip, number)
                for name, number in rows(section, options.paths)
                for chip in options.chip or CHIPS
                if not options.only or any(o in name for o in options.only)
            ]
            for row, found in zip(chosen, pool.map(partial(in_a_process, effort=options.effort), chosen), strict=True):
                print(*row, ratios(found) or found, flush=True)
                if found:
                    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}  # others may write meanwhile
                    kept.setdefault(section, {})[row.key] = found
                    KEPT.write_text(
                        json.dumps({s: _ordered(s, kept[s]) for s in SECTIONS if s in kept}, indent=1) + "\n"
                    )
    PAGE.write_text("\n".join(lines(json.loads(KEPT.read_text()), options.effort)) + "\n")
    return 0


def _ordered(section: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """A section's rows in the order of the page; files by name."""
    names = {f"{name}; {number}": place for place, (name, number) in enumerate(rows(section, ()))}

    def place(key: str) -> Any:
        name, _, number = key.split("; ")
        return names.get(f"{name}; {number}", 0), key

    return dict(sorted(found.items(), key=lambda item: place(item[0])))


if __name__ == "__main__":
    sys.exit(main())
