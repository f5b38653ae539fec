"""Accelerators that XLA compiles for without one at hand, with their published peaks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

from ... import compat
from ...errors import ShardingError

MAX_DEVICES: Final = 2048
"""Devices of a plan: as many as XLA's CPU client has in a process. Listing 100 000 takes minutes."""
_TPU_SIDE: Final = 16
"""Chips along an axis of the largest slices of v5e and v6e, 16x16: beyond, XLA aborts the process."""


@dataclass(frozen=True)
class Chip:
    """One accelerator.

    Attributes:
        title: as its vendor names it.
        flops: peak of bfloat16 matrix products with float32 accumulation, dense, a second.
        bandwidth: of its main memory, bytes a second.
        memory: bytes.
        target: XLA's GpuTargetConfigProto as text; empty for a TPU.
    """

    title: str
    flops: float
    bandwidth: float
    memory: int
    target: str = ""


@dataclass(frozen=True)
class Slice:
    """Several chips of one type, connected.

    Attributes:
        name: as the user wrote it, such as ``v5e:2x2``.
        chip: their type.
        devices: abstract devices, to make a ``jax.sharding.Mesh`` of.
    """

    name: str
    chip: Chip
    devices: list[Any]


def _cuda(title: str, **facts: Any) -> str:
    """A GPU's facts as XLA's GpuTargetConfigProto, in protobuf's text format."""
    limits = {
        **{"threads_per_block_limit": 1024, "threads_per_warp": 32, "shared_memory_per_block": 49152},
        **{"threads_per_core_limit": 2048, "block_dim_limit_x": 2**31 - 1, "block_dim_limit_y": 65535},
        **{"block_dim_limit_z": 65535, "registers_per_core_limit": 65536, "registers_per_block_limit": 65536},
    }
    capability = "cuda_compute_capability {{ major: {} minor: {} }}".format(*facts.pop("capability"))
    info = "\n".join([*(f"{n}: {v}" for n, v in {**limits, **facts}.items()), capability])
    versions = "dnn_version_info { major: 9 minor: 28 }\nruntime_version { major: 12 minor: 9 }"
    return f'gpu_device_info {{ {info} }}\nplatform_name: "CUDA"\n{versions}\ndevice_description_str: "{title}"'


_H100: Final = _cuda(
    "NVIDIA H100 80GB HBM3", capability=(9, 0), core_count=132, fpus_per_core=128, clock_rate_ghz=1.98,
    shared_memory_per_core=233472, shared_memory_per_block_optin=232448, l2_cache_size=52428800,
    memory_bandwidth=3352320000000, device_memory_size=84978434048,
)  # fmt: skip
_A100: Final = _cuda(
    "NVIDIA A100-SXM4-80GB", capability=(8, 0), core_count=108, fpus_per_core=64, clock_rate_ghz=1.41,
    shared_memory_per_core=167936, shared_memory_per_block_optin=166912, l2_cache_size=41943040,
    memory_bandwidth=2039000000000, device_memory_size=84987740160,
)  # fmt: skip

CHIPS: Final[Mapping[str, Chip]] = {
    "v5e": Chip("TPU v5e", 197e12, 0.819e12, 16 * 2**30),
    "v6e": Chip("TPU v6e", 918e12, 1.64e12, 32 * 2**30),
    "a100": Chip("NVIDIA A100 80 GB SXM", 312e12, 2.039e12, 80 * 10**9, _A100),
    "h100": Chip("NVIDIA H100 80 GB SXM", 989e12, 3.352e12, 80 * 10**9, _H100),
}
"""Peaks as Google and NVIDIA publish them, without sparsity. Not v4 and v5p: deviceless topologies have two devices a
chip there, and JAX on such a machine has one."""


def slice_of(name: str) -> Slice:
    """The chips of a name such as ``v5e``, ``v5e:2x2`` or ``h100:8``.

    Raises:
        ShardingError: there is no such chip or topology, or it is too large.
        ImportError: XLA's compiler for it is not installed.
    """
    kind, _, grid = name.partition(":")
    sizes = tuple(int(n) if n.isdecimal() else 0 for n in grid.split("x")) if grid else (1,)
    if kind not in CHIPS or not all(sizes) or len(sizes) > 3:
        raise ShardingError(
            f"{name!r} is no topology; write a chip ({', '.join(CHIPS)}) or several: 'v5e:2x4', 'h100:8'"
        )
    chip = CHIPS[kind]
    side, most = (MAX_DEVICES, MAX_DEVICES) if chip.target else (_TPU_SIDE, _TPU_SIDE**2)
    if max(sizes) > side or math.prod(sizes) > most:
        largest = f"{kind}:{most if chip.target else f'{side}x{side}'}"
        raise ShardingError(f"{name!r} is too large to plan for: the largest topology of {kind} is {largest!r}")
    plugin = "jax_cuda13_plugin" if find_spec("jax_cuda13_plugin") else "jax_cuda12_plugin"
    compat.optional(*((plugin, "cuda") if chip.target else ("libtpu", "tpu")))
    try:
        if chip.target:
            return Slice(name, chip, compat.cuda_topology(chip.target, math.prod(sizes)))
        return Slice(name, chip, compat.tpu_topology(kind, sizes))
    except Exception as error:  # XLA has a class of its own for each release
        fix = "; without CUDA's libraries start Python with JAX_PLATFORMS=cpu" if chip.target else ""
        raise ShardingError(f"XLA has no topology {name!r}: {str(error).splitlines()[0]}{fix}") from error
