"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from onnx2jax.ops import registry
from onnx2jax.runtime import program_cache
from tests.support.helpers import ROOT
from tests.support.ledger import Ledger

# Eight virtual devices of the CPU, for tests of sharding (``helpers.mesh``). What says nothing about devices runs on
# the first of them as it would on the only one. Here, because it has to be set before JAX first runs anything.
if jax.config.jax_num_cpu_devices != 8:
    jax.config.update("jax_num_cpu_devices", 8)

# Most programs of the tests are small and run once: compiling them is most of the time, and LLVM's optimiser a third of
# that. In the environment, for the processes that tests start, too. `JAX_DISABLE_MOST_OPTIMIZATIONS=0 make test`
# compiles as users do.
if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    jax.config.update("jax_disable_most_optimizations", True)
    # XLA's older emitters of fusions take 0.6 of the processor time to compile. Later releases know no such flag, and
    # end the process on one that they do not know.
    if jax.version.__version_info__ < (0, 12) and "XLA_FLAGS" not in os.environ:
        os.environ["XLA_FLAGS"] = "--xla_cpu_use_fusion_emitters=false"

jax.config.update("jax_traceback_filtering", "off")  # which takes half of the time of an error inside of JAX
os.environ["ONNX2JAX_CACHE_DIR"] = ""  # tests count compilations, and write nothing into the user's folder
registry.load_all()  # before tests exchange the registry for a copy

# In the environment like the other caches, not in the working tree.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(ROOT / ".venv" / ".hypothesis"))

MEMORY = 3 << 30
"""Bytes that a process may occupy between two tests before it drops compiled programs, of a megabyte or more each."""
_limit = MEMORY


def _resident() -> int:
    """Bytes of memory that this process occupies; where Linux does not say, the most that it ever has."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish() -> None:
    """Between two tests, drop what JAX has compiled if it takes much memory: all of it is compiled again on demand."""
    global _limit
    if _resident() > _limit:
        jax.clear_caches()
        gc.collect()
        _limit = max(MEMORY, _resident() + (1 << 30))  # what tests themselves hold stays


def pytest_configure(config: pytest.Config) -> None:
    text = "rule(*ids): the rules of the format that a test proves; see docs/conformance.md"
    config.addinivalue_line("markers", text)
    config.pluginmanager.register(Ledger(config), "ledger")


@pytest.fixture(autouse=True)
def strict_promotion() -> Iterator[None]:
    """Two element types meet only where an operator says so. Users keep their setting."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def standard_promotion(strict_promotion: None) -> Iterator[None]:  # noqa: ARG001
    """As users have it: optax mixes element types, and so do losses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def in_32_bits() -> Iterator[None]:
    """A process as JAX starts it, also where JAX_ENABLE_X64 is set."""
    with jax.enable_x64(False):
        yield


@pytest.fixture
def one_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with one device, where programs are stored."""
    monkeypatch.setattr(program_cache, "_is_one_cpu", lambda: True)


@pytest.fixture
def without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if rich were not installed."""
    for name in [m for m in sys.modules if m.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the official cases: properties of reports arrive from every worker."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    whole = [report for report in reports if not isinstance(report, pytest.SubtestReport)]
    found = [(name, value) for report in whole for name, value in report.user_properties]
    runs = [value for name, value in found if name == "official"]
    if cases := sum(value for name, value in found if name == "official cases"):
        jitted, one = runs.count("in 32 bits"), runs.count("one program")
        terminalreporter.write_line(
            f"official suite: {len(runs) - jitted} of {cases} cases pass, {one} of them as one program, "
            f"{jitted} in a caller's jit in 32 bits"
        )
