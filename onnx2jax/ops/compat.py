"""Every use of a JAX interface that differs between releases."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import AxisType, Mesh


def enable_x64() -> AbstractContextManager[Any]:
    """A scope in which 64-bit types exist; the process-wide setting stays as it is."""
    return jax.enable_x64(True)


def auto(mesh: Mesh) -> Mesh:
    """The mesh with axes that the compiler handles; since JAX 0.9 ``jax.make_mesh`` makes Explicit ones."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
