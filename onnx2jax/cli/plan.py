"""``onnx2jax plan model.onnx --mesh data=8,model=8``: what a model would cost on many devices, without one of them."""

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
        "show what a model would cost on many devices: FLOPs, bytes, and what they exchange",
        example="plan model.onnx --mesh data=8,model=8 --plan data+tensor --dim sequence=512",
    )
    plan.add_argument("model", type=Path, help="its weights are not read, and data beside it need not be there")
    plan.add_argument("--mesh", required=True, metavar="NAME=N,...", help="axes; one called stage makes a pipeline")
    plan.add_argument(
        "--plan", choices=KINDS, default="", help="how to divide it (default: inputs along the first axis)"
    )
    plan.add_argument("--weights-only", action="store_true", help="bytes of weights and inputs; compile nothing")
    add_dims(plan, "a free dimension; the batch is as many as devices where it is not given, and others 1")


def _plan(arguments: argparse.Namespace) -> int:
    axes = _axes(arguments.mesh)
    flag = f"{FLAG}{math.prod(axes.values())}"
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags.split():  # JAX counts devices once in a process
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
    facts = [("parameters", found.parameters), ("bytes of weights a device", found.weight_bytes)]
    facts.append(("bytes of inputs a device", found.input_bytes))
    if found.flops is not None and found.scratch_bytes is not None:
        facts += [("bytes beside, on a CPU", found.scratch_bytes), ("FLOPs a device", found.flops)]
    title = f"mesh {mesh}{f', plan {found.plan}' if found.plan else ''}; {extents or 'no free dimensions'}"
    print_table(title, ("a step", ""), [(what, f"{number:,}") for what, number in facts])
    if not arguments.weights_only:
        rows = [(e.kind, f"{e.number:,}", f"{e.bytes:,}") for e in found.exchanges]
        print_table("exchanges", ("collective", "number", "bytes on a device"), rows)
    return 0


def _axes(text: str) -> dict[str, int]:
    axes = {}
    for name, size in pairs("--mesh", text.split(","), "N"):
        if not size.isdecimal() or int(size) < 1 or name in axes:
            raise CommandError(f"--mesh {text}: expected axes with their extents, such as data=8,model=8")
        axes[name] = int(size)
    return axes
