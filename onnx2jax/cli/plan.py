"""``onnx2jax plan model.onnx --for v5e:2x2``: the cost of a model on devices, estimated without them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import ShardingError
from ..model.devices.chips import CHIPS, MAX_DEVICES
from ..model.devices.cost import Cost, cost
from ..progress import stage
from ..sharding.plans import KINDS
from .parser import Arguments, CommandError, Parser, pair, reading
from .terminal import Table, flags, note, print_result

FLAG = "--xla_force_host_platform_device_count="


def add_plan(parser: Parser) -> None:
    """Add the options of the command."""
    parser.describe(
        "plan model.onnx --for v5e:2x4 --mesh data=2,model=4 --plan data+tensor --dim sequence=512",
        model="weights are not read; external data may be missing",
    )
    parser.add_argument("--for", dest="chips", default="", metavar="CHIP[:NxN]", help=f"compile for {', '.join(CHIPS)}")
    parser.add_argument(
        "--mesh",
        default="",
        metavar="NAME=N,...",
        help="mesh axes; an axis named stage makes a pipeline (default: data)",
    )
    parser.add_argument(
        "--plan", choices=KINDS, default="", help="how to shard the model (default: inputs along the first axis)"
    )
    parser.add_switch("--weights-only", "only bytes of weights and inputs, without compiling")
    parser.add_dtype()
    parser.add_dims(
        "the extent of a dimension variable (default: of the batch the number of devices that share it, of a decoder's "
        "caches and mask as inferred, 1 of others)"
    )


def do_plan(arguments: Arguments) -> int:
    if not arguments.mesh and not arguments.chips:
        raise CommandError("plan needs devices: --for v5e:2x2, or --mesh data=8,model=8 for devices of a CPU")
    axes = _axes(arguments.mesh) if arguments.mesh else {}
    flag = f"{FLAG}{1 if arguments.chips else math.prod(axes.values())}"
    before = os.environ.get("XLA_FLAGS", "")
    if flag not in before.split():  # JAX reads the number of devices once per process
        others = [f for f in before.split() if not f.startswith(FLAG)]
        env = {**os.environ, "XLA_FLAGS": " ".join([*others, flag]), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "onnx2jax", *arguments.argv]
        with stage(f"compiling for {arguments.chips or f'{math.prod(axes.values())} devices'}"):
            return subprocess.run(command, env=env, check=False).returncode
    options = {"chips": arguments.chips, "dtype": arguments.dtype, **reading(arguments)}
    sizes = dict(arguments.dim)
    estimate = cost(arguments.model, axes, arguments.plan, sizes, not arguments.weights_only, **options)
    print_result(arguments, estimate.facts(), *_parts(estimate))
    if not estimate.sharded and not arguments.json:
        fix = _sharding(arguments.model, estimate, sizes, options)
        note(f"nothing is sharded: each device holds all weights and inputs{fix and f'. Try {fix}'}")
    return 0 if estimate.on_chip is None or estimate.on_chip.fits else 1


def _parts(estimate: Cost) -> Iterator[Table | str]:
    """The tables of an estimate."""
    mesh = " x ".join(f"{n}: {size}" for n, size in estimate.mesh.items())
    extents = ", ".join(f"{n}={size}" for n, size in estimate.dims.items())
    title = f"mesh {mesh}{f', plan {estimate.plan}' if estimate.plan else ''}; {extents or 'no dimension variables'}"
    facts = [("parameters", estimate.parameters), ("bytes of weights per device", estimate.weight_bytes)]
    facts.append(("bytes of inputs per device", estimate.input_bytes))
    chip = estimate.on_chip
    if chip is not None and chip.needed is not None:
        facts += [("temporary bytes per chip", chip.temporary or 0), ("bytes needed per chip", chip.needed)]
        facts += [("memory of a chip", chip.memory), ("bytes read and written by kernels", chip.moved)]
        facts += [("kernels", chip.kernels), *[("cycles (XLA's estimate)", chip.cycles)] * bool(chip.cycles)]
        facts.append(("lower bound, microseconds", math.ceil(chip.least_seconds * 1e6)))
    elif chip is None and estimate.flops is not None and estimate.scratch_bytes is not None:
        facts += [("temporary bytes, on a CPU", estimate.scratch_bytes), ("FLOPs per device", estimate.flops)]
    yield Table(title, ("per step", ""), [(what, f"{number:,}") for what, number in facts])
    if chip is not None:
        verdict = "fits" if chip.fits else f"does not fit: {chip.refused or 'it needs more memory than the chip has'}"
        yield f"{chip.chip}: {verdict}"
        nodes = [(n.name, n.operator, f"{n.share:.1%}") for n in chip.nodes]
        yield Table("costliest nodes", ("node", "operator", "share"), nodes)
    if estimate.flops is not None:
        rows = [(e.kind, f"{e.number:,}", f"{e.bytes:,}") for e in estimate.exchanges]
        yield Table("collectives", ("kind", "number", "bytes per device"), rows)


def _sharding(model: Path, estimate: Cost, sizes: Mapping[str, int], options: Mapping[str, Any]) -> str:
    """Flags in place of those of a plan that shards nothing, with which it shards; empty if none do."""
    mesh, plan, devices = estimate.mesh, estimate.plan, math.prod(estimate.mesh.values())
    tries: list[tuple[Mapping[str, int], str, Mapping[str, int], str]]
    tries = [(mesh, plan, {**sizes, n: devices}, flags("--dim", {n: devices})) for n in estimate.dims]
    for axis, size in mesh.items():
        smaller = [{**mesh, axis: n} for n in (2**i for i in range(size.bit_length() - 1, 0, -1)) if n < size]
        tries += [(m, plan, sizes, f"--mesh {','.join(f'{a}={n}' for a, n in m.items())}") for m in smaller]
    tries += [(mesh, kind, sizes, f"--plan {kind}") for kind in KINDS if kind != plan]
    for axes, plan, extents, words in tries:
        with suppress(ShardingError):  # such as that of a plan whose axis the mesh lacks
            if cost(model, axes, plan, extents, False, **options).sharded:
                return words
    return ""


def _axes(text: str) -> dict[str, int]:
    axes = {}
    for part in text.split(","):
        name, size = pair("--mesh", "NAME=N", part)
        if not size.isdecimal() or int(size) < 1 or name in axes:
            raise CommandError(f"--mesh {text}: expected axes with their extents, such as data=8,model=8")
        axes[name] = int(size)
    if (count := math.prod(axes.values())) > MAX_DEVICES:
        raise CommandError(f"--mesh {text} has {count} devices; a plan takes at most {MAX_DEVICES}: use a smaller mesh")
    return axes
