"""Devices that XLA compiles for without one at hand, from the compilers in libtpu and in JAX's CUDA plugin."""

from __future__ import annotations

import os
from typing import Any, Final

import jax

_TPU_WITHOUT_HOST: Final = {
    "TPU_SKIP_MDS_QUERY": "1",  # no metadata server to ask
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may compile at once
}


def tpu_topology(name: str, chips: tuple[int, ...]) -> list[Any]:
    """Abstract TPU devices.

    Args:
        name: the generation, such as ``v5e``.
        chips: their number along each axis of the torus.
    """
    from jax.experimental import topologies

    for variable, value in _TPU_WITHOUT_HOST.items():
        os.environ.setdefault(variable, value)
    grid = (*chips, *(1,) * (3 - len(chips)))
    bounds = {"chips_per_host_bounds": (1, 1, 1)} if grid == (1, 1, 1) else {}
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=f"{name}:{'x'.join(map(str, grid))}", **bounds
    )
    return list(topology.devices)


def cuda_topology(target: str, count: int) -> list[Any]:
    """Abstract CUDA devices of one host.

    Args:
        target: XLA's GpuTargetConfigProto as text.
        count: number of GPUs.
    """
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology=f"1x1x{count}")
    return list(topology.devices)


def compiles_only(device: Any) -> bool:
    """Whether programs can be compiled for a device, but not run on it: one of a topology."""
    return "CompileOnly" in type(device.client).__name__


def compile_without_device(lowered: Any, *, cublas: bool = False) -> Any:
    """``lowered.compile()``; with cuBLAS for products where XLA, which has no GPU to tune on, knows no tiles for one.

    A process with a GPU compiles the same program as it is (ViT-small with eight images, jax 0.11.2 on an H100).

    Args:
        lowered: a lowered function.
        cublas: whether all products of a program for CUDA are cuBLAS's: so that two programs can be compared.
    """
    if not cublas:
        try:
            return lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "output tile sizes" not in str(error):
                raise
    return lowered.compile({"xla_gpu_enable_triton_gemm": False})


def lowering_platform(device: Any) -> str:
    """The name of a device's platform in ``lax.platform_dependent``: "cuda" or "rocm" where the device says "gpu"."""
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
