"""JAX interfaces that are private or differ between releases, and packages that come with an extra.

A private interface is looked up when it is needed, inside a function that has a fallback; without it calls, gradients,
``vmap`` and exports give the same numbers, perhaps more slowly. tests/test_compat.py removes each one.
"""

from __future__ import annotations

import importlib.util
import re
from typing import Any, Final

from .config import any_values as any_values
from .config import checks_values as checks_values
from .config import configuration as configuration
from .config import enable_x64 as enable_x64
from .config import in_32_bits as in_32_bits
from .config import keeps_programs as keeps_programs
from .config import process_options as process_options
from .config import rejected_value as rejected_value
from .config import rejects_values as rejects_values
from .config import trace_context as trace_context
from .devices import auto as auto
from .devices import compile_without_device as compile_without_device
from .devices import compiles_only as compiles_only
from .devices import context_mesh as context_mesh
from .devices import cuda_topology as cuda_topology
from .devices import gathered as gathered
from .devices import gathered_texts as gathered_texts
from .devices import in_auto_axes as in_auto_axes
from .devices import lowering_platform as lowering_platform
from .devices import noticeboard as noticeboard
from .devices import reshard as reshard
from .devices import spread as spread
from .devices import tpu_topology as tpu_topology
from .programs import annotation as annotation
from .programs import calls_process as calls_process
from .programs import cores as cores
from .programs import cost_analysis as cost_analysis
from .programs import devices_of as devices_of
from .programs import dump_compiled as dump_compiled
from .programs import eigen_convolutions as eigen_convolutions
from .programs import erf as erf
from .programs import has_int8_kernels as has_int8_kernels
from .programs import has_narrow_arguments as has_narrow_arguments
from .programs import has_onednn as has_onednn
from .programs import has_serial_loops as has_serial_loops
from .programs import jaxlib_release as jaxlib_release
from .programs import load_compiled as load_compiled
from .programs import lowered_devices as lowered_devices
from .programs import lowered_key as lowered_key
from .programs import merges_constants as merges_constants
from .programs import onednn as onednn
from .programs import profiled as profiled
from .programs import scan_constants as scan_constants
from .programs import synchronous_device as synchronous_device
from .programs import unwrapped as unwrapped
from .programs import x86_features as x86_features
from .tracing import PLATFORMS as PLATFORMS
from .tracing import before_repeat as before_repeat
from .tracing import call_in_64_bits as call_in_64_bits
from .tracing import forward_only as forward_only
from .tracing import functions as functions
from .tracing import has_primitives as has_primitives
from .tracing import in_64_bits as in_64_bits
from .tracing import in_a_program as in_a_program
from .tracing import is_transformed as is_transformed
from .tracing import keeps_convolutions as keeps_convolutions
from .tracing import on_any_platform as on_any_platform
from .tracing import on_platform as on_platform
from .tracing import outside as outside
from .tracing import platform as platform
from .tracing import platform_dependent as platform_dependent
from .tracing import primal as primal
from .tracing import repeated_axes as repeated_axes
from .tracing import scaled as scaled


def optional(module: str, extra: str) -> Any:
    """A module that comes with an extra of this package.

    Raises:
        ImportError: it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise ImportError(needs(extra, e), name=module) from e


def needs(extra: str, why: object) -> str:
    """The message that an extra is not installed, with the command that installs it."""
    return f"this needs the extra {extra} ({why}): {install(extra)}"


def install(extra: str) -> str:
    """The command that installs the packages of an extra, by their own names: it works wherever this package is from.

    >>> install("re2")
    "pip install 'google-re2>=1.1'"
    """
    from importlib import metadata  # takes 20 ms

    try:
        listed = metadata.requires(__name__.partition(".")[0]) or []
    except metadata.PackageNotFoundError:  # a folder on the path
        listed = []
    entries = (text.partition(";") for text in listed)
    packages = [f"'{name.strip()}'" for name, _, of in entries if re.search(rf"extra == ['\"]{extra}['\"]", of)]
    return f"pip install {' '.join(packages)}" if packages else f"pip install '.[{extra}]' in a clone"


MODULES: Final = {"image": "PIL", "re2": "re2", "text": "tokenizers"}
"""The module of each extra that operators need."""


def lacks(extra: str) -> bool:
    """Whether the module of an extra that operators need is not installed; does not import it."""
    return importlib.util.find_spec(MODULES[extra]) is None
