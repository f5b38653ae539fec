"""Describes the machine of the measurements."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any, Final

from .harness import cores

TOLD: Final = ("avx2", "fma", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "asimd", "sve")
"""Instruction sets that determine the speed of matrix products, as named by Linux."""
PACKAGES: Final = ("jax", "jaxlib", "numpy", "onnx", "onnxruntime", "torch")


def machine() -> dict[str, Any]:
    """Processor, cores, instruction sets, versions."""
    info = _cpuinfo()
    flags = set(info.get("flags", info.get("Features", "")).split())
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "processor": info.get("model name", platform.processor() or platform.machine()),
        "cores": cores(),
        "instructions": [t for t in TOLD if t in flags],
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": versions,
    }


def sentence(machine: dict[str, Any]) -> str:
    """The description in one line."""
    versions = ", ".join(f"{n} {v}" for n, v in machine["versions"].items())
    sets = ", ".join(machine["instructions"]) or "not known"
    processor = f"{machine['cores']} cores of {machine['processor']} (instruction sets: {sets})"
    return f"{processor}, {machine['system']}; {versions}."


def _cpuinfo() -> dict[str, str]:
    """The entries of the first core in /proc/cpuinfo; empty without that file."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    lines = path.read_text().split("\n\n")[0].splitlines()
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
