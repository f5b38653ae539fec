"""Every use of a JAX interface that differs between releases, and of packages that come with an extra."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    get_abstract_mesh,
    use_abstract_mesh,
)


def enable_x64() -> AbstractContextManager[Any]:
    """A scope in which 64-bit types exist; the process-wide setting stays as it is."""
    return jax.enable_x64(True)


def optional(module: str, extra: str) -> Any:
    """A module that comes with an extra of this package.

    Raises:
        ImportError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise ImportError(f"this needs {module} ({e}): pip install 'onnx2jax[{extra}]'", name=module) from e


def auto(mesh: Mesh) -> Mesh:
    """The mesh with axes that the compiler handles; since JAX 0.9 ``jax.make_mesh`` makes Explicit ones."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def context_mesh() -> AbstractMesh:
    """The mesh of ``jax.set_mesh``, without axes where there is none."""
    return get_abstract_mesh()


def in_auto_axes(mesh: Any) -> AbstractContextManager[Any]:
    """A scope in which the mesh's Explicit axes are Auto; those of a ``shard_map`` around stay Manual."""
    explicit = [n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Explicit]
    return use_abstract_mesh(mesh.update_axis_types(dict.fromkeys(explicit, AxisType.Auto)))


@contextmanager
def outside() -> Iterator[None]:
    """A scope without the caller's transformations and meshes: what is computed there can be kept."""
    with jax.core.eval_context(), use_abstract_mesh(AbstractMesh((), ())):
        yield


def reshard(x: Any, sharding: NamedSharding | PartitionSpec) -> Any:
    """The array with another sharding in its type; a spec alone is over the mesh of the context."""
    return jax.sharding.reshard(x, sharding)


def forward_only(x: Any, error: Exception) -> Any:
    """x; who differentiates it in reverse meets the error."""
    return _forward_only.bind(x, error=error)


def _refuse(_cotangent: Any, _x: Any, *, error: Exception) -> Any:
    raise error


def _jvp(primals: Any, tangents: Any, *, error: Exception) -> Any:
    (x,), (t,) = primals, tangents
    return forward_only(x, error), t if isinstance(t, ad.Zero) else forward_only(t, error)


def _batch(xs: Any, axes: Any, *, error: Exception) -> Any:
    (x,) = xs
    return forward_only(x, error), axes[0]


_forward_only = Primitive("forward_only")
_forward_only.def_impl(lambda x, **_: x)
_forward_only.def_abstract_eval(lambda x, **_: x)
ad.primitive_jvps[_forward_only] = _jvp
ad.primitive_transposes[_forward_only] = _refuse
batching.primitive_batchers[_forward_only] = _batch
mlir.register_lowering(_forward_only, lambda _ctx, x, **_: [x])
