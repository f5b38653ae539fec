"""``onnx2jax plan model.onnx --mesh data=8,model=8``: the cost of a model on many devices, estimated without them."""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..model.devices.cost import cost
from ..sharding.plans import KINDS
from .terminal import CommandError, add_command, add_dims, dims, pairs, print_json, print_table, working

FLAG = "--xla_force_host_platform_device_count="


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    plan = add_command(
        commands,
        "plan",
        _plan,
        "estimate a model's cost on many devices: FLOPs, bytes, and collectives",
        example="plan model.onnx --mesh data=8,model=8 --plan data+tensor --dim sequence=512",
    )
    plan.add_argument("model", type=Path, help="weights are not read; external data may be missing")
    plan.add_argument(
        "--mesh", required=True, metavar="NAME=N,...", help="mesh axes; an axis named stage makes a pipeline"
    )
    plan.add_argument(
        "--plan", choices=KINDS, default="", help="how to shard the model (default: inputs along the first axis)"
    )
    plan.add_argument("--weights-only", action="store_true", help="only bytes of weights and inputs, without compiling")
    add_dims(plan, "the extent of a dimension variable (default: the number of devices for the batch, 1 for others)")


def _plan(arguments: argparse.Namespace) -> int:
    axes = _axes(arguments.mesh)
    flag = f"{FLAG}{math.prod(axes.values())}"
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags.split():  # JAX reads the number of devices once per process
        others = [f for f in flags.split() if not f.startswith(FLAG)]
        env = {**os.environ, "XLA_FLAGS": " ".join([*others, flag]), "JAX_PLATFORMS": "cpu"}
        own = [str(arguments.model), "--mesh", arguments.mesh, *(f"--dim={d}" for d in arguments.dim)]
        own += [f"--plan={arguments.plan}"] * bool(arguments.plan)
        own += ["--json"] * arguments.json + ["--weights-only"] * arguments.weights_only
        with working(f"compiling for {math.prod(axes.values())} devices"):
            return subprocess.run([sys.executable, "-m", "onnx2jax", "plan", *own], env=env, check=False).returncode
    found = cost(arguments.model, axes, arguments.plan, dims(arguments.dim), not arguments.weights_only)
    if arguments.json:
        print_json(found.facts())
        return 0
    mesh = " x ".join(f"{n}: {size}" for n, size in axes.items())
    extents = ", ".join(f"{n}={size}" for n, size in found.dims.items())
    facts = [("parameters", found.parameters), ("bytes of weights per device", found.weight_bytes)]
    facts.append(("bytes of inputs per device", found.input_bytes))
    if found.flops is not None and found.scratch_bytes is not None:
        facts += [("temporary bytes, on a CPU", found.scratch_bytes), ("FLOPs per device", found.flops)]
    title = f"mesh {mesh}{f', plan {found.plan}' if found.plan else ''}; {extents or 'no dimension variables'}"
    print_table(title, ("per step", ""), [(what, f"{number:,}") for what, number in facts])
    if not arguments.weights_only:
        rows = [(e.kind, f"{e.number:,}", f"{e.bytes:,}") for e in found.exchanges]
        print_table("collectives", ("kind", "number", "bytes per device"), rows)
    return 0


def _axes(text: str) -> dict[str, int]:
    axes = {}
    for name, size in pairs("--mesh", text.split(","), "N"):
        if not size.isdecimal() or int(size) < 1 or name in axes:
            raise CommandError(f"--mesh {text}: expected axes with their extents, such as data=8,model=8")
        axes[name] = int(size)
    return axes
