"""JAX's configuration: options, scopes, and keys made of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import get_abstract_mesh


def enable_x64() -> AbstractContextManager[Any]:
    """A scope in which 64-bit types exist and operands broadcast as in ONNX; process-wide settings stay."""
    if jax.config.jax_numpy_rank_promotion == "allow":  # type: ignore[attr-defined]
        return jax.enable_x64(True)
    return _enable_x64_and_broadcasting()


@contextmanager
def _enable_x64_and_broadcasting() -> Iterator[None]:
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        yield


def in_32_bits() -> bool:
    """Whether 64-bit types do not exist where the caller is."""
    return jax.dtypes.canonicalize_dtype(np.int64) != np.int64


_OPTIONS: Final = (
    "jax_debug_infs",
    "jax_debug_nans",
    "jax_default_device",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_jit",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_softmax_custom_jvp",
    "jax_threefry_partitionable",
)
_options = attrgetter(*(name for name in _OPTIONS if hasattr(jax.config, name)))


def configuration() -> tuple[Any, ...]:
    """The options of ``jax.config`` that change what is compiled, as values whose ``repr`` holds in other processes."""
    return _options(jax.config)


_OF_THE_PROCESS: Final = re.compile("cache|log|dump|trace|explain|profil|distributed|coordin|debug|check|cluster|mock")
"""In names of options that programs do not depend on."""


def process_options() -> str:
    """All options of ``jax.config`` that a compiled program may depend on, for caches on disk; scopes change others."""
    options = getattr(jax.config, "values", {})
    return repr([(n, options[n]) for n in sorted(options) if not _OF_THE_PROCESS.search(n)])


def _trace_context() -> Callable[[], Hashable]:
    """JAX's functions, which are private; without them the public options, which are slower, and the mesh."""
    try:
        from jax._src import config

        context, nans, infs, prng = config.trace_context, config.debug_nans, config.debug_infs, config.default_prng_impl

        def key() -> Hashable:
            return context(), nans.value, infs.value, prng.value

        hash(key())
        return key
    except (ImportError, AttributeError, TypeError):
        return lambda: (_options(jax.config), jax.config.jax_enable_x64, get_abstract_mesh())  # type: ignore[attr-defined]


trace_context: Final = _trace_context()
"""Everything in JAX's configuration, scopes included, that decides what is traced and compiled.

For the keys of caches in memory: JAX's own key of its trace caches, and the options that it leaves out.
"""


def checks_values() -> bool:
    """True if debug_nans, debug_infs or disable_jit is set."""
    return rejects_values() or bool(jax.config.jax_disable_jit)  # type: ignore[attr-defined]


def rejects_values() -> bool:
    """True if debug_nans or debug_infs is set."""
    return bool(jax.config.jax_debug_nans or jax.config.jax_debug_infs)  # type: ignore[attr-defined]


@contextmanager
def any_values() -> Iterator[None]:
    """A scope without debug_nans and debug_infs."""
    with jax.debug_nans(False), jax.debug_infs(False):
        yield


def rejected_value(array: np.ndarray) -> str:
    """What a result must not hold by ``jax.debug_nans`` or ``debug_infs``, and this one does: "nan" or "inf"."""
    if not jnp.issubdtype(array.dtype, np.inexact):
        return ""
    tests = {"nan": np.isnan, "inf": np.isinf}
    return next((n for n, f in tests.items() if getattr(jax.config, f"jax_debug_{n}s") and f(array).any()), "")


def keeps_programs() -> bool:
    """Whether JAX keeps compiled programs for later processes, as far as its options say."""
    folder = getattr(jax.config, "jax_compilation_cache_dir", "unknown")
    return bool(folder and getattr(jax.config, "jax_enable_compilation_cache", True))
