"""Devices: meshes over them, arrays over several processes, and those that XLA compiles for without one at hand.

The compilers for such topologies are in libtpu and in JAX's CUDA plugin.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, Sharding, get_abstract_mesh, use_abstract_mesh

from .config import enable_x64


def auto(mesh: Mesh) -> Mesh:
    """The mesh with Auto axes, which the compiler handles; since JAX 0.9 ``jax.make_mesh`` makes Explicit ones."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


context_mesh: Final = get_abstract_mesh
"""The mesh of ``jax.set_mesh``, without axes where there is none."""


def in_auto_axes(mesh: Any) -> AbstractContextManager[Any]:
    """A scope in which the mesh's Explicit axes are Auto; those of a ``shard_map`` around stay Manual."""
    explicit = [n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Explicit]
    return use_abstract_mesh(mesh.update_axis_types(dict.fromkeys(explicit, AxisType.Auto)))


reshard: Final = jax.sharding.reshard
"""The array with another sharding in its type; a spec alone is over the mesh of the context."""


def spread(x: jax.Array, sharding: Sharding) -> jax.Array:
    """An array of several processes with another sharding over the same devices; all of them call this."""
    return jax.jit(_identity, out_shardings=sharding)(x)


def _identity(x: Any) -> Any:
    return x


def gathered(x: jax.Array) -> np.ndarray:
    """The values of an array of several processes, as NumPy in each; all of them call this."""
    from jax.experimental import multihost_utils

    with enable_x64():
        return np.asarray(x) if x.is_fully_replicated else multihost_utils.process_allgather(x, tiled=True)


def gathered_texts(text: str) -> list[str]:
    """The texts of all processes, in their order; all of them call this, and wait for one that does not."""
    from jax.experimental import multihost_utils

    data = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(data.size))
    rows = multihost_utils.process_allgather(np.pad(data, (0, lengths.max() - data.size)))
    return [bytes(row[:n]).decode() for row, n in zip(rows, lengths, strict=True)]


def noticeboard() -> Any:
    """The key-value store of ``jax.distributed.initialize``; None without it, or where JAX no longer hands it out.

    It has ``key_value_set(key, text)``, ``blocking_key_value_get(key, milliseconds)``, ``key_value_dir_get(folder)``
    and ``key_value_delete(key)``. Without it ``gathered_texts`` exchanges texts.
    """
    try:
        from jax._src import distributed

        return distributed.global_state.client
    except (ImportError, AttributeError):
        return None


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
