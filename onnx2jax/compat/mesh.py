"""Meshes and the types of their axes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final

import jax
from jax.sharding import AxisType, Mesh, get_abstract_mesh, use_abstract_mesh


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
