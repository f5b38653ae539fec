"""Costs on chips that are not there.

``make check-accelerators`` compiles with XLA's compilers for them, which are apart; here a chip's devices are CPUs.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import onnx
import pytest

import onnx2jax
from onnx2jax import cli
from onnx2jax.errors import ShardingError
from onnx2jax.model.devices import chips
from onnx2jax.model.devices import cost as costs
from onnx2jax.sharding.processes import processes
from tests.support.models import mlp

SMALL = chips.Chip("a chip of 600 bytes", 1e6, 1e6, 600)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    onnx.save(mlp(), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CPUs as chips that hold 600 bytes."""
    devices = jax.devices("cpu")[:2]
    monkeypatch.setattr(costs, "slice_of", lambda name: chips.Slice(name, SMALL, devices))


@pytest.mark.parametrize("name", ["v7", "v5e:2y2", "v5e:0x2", "h100:1x1x1x1", ""])
def test_unknown_chips_are_refused(name: str) -> None:
    with pytest.raises(ShardingError, match="write a chip"):
        chips.slice_of(name)


@pytest.mark.parametrize(
    ("name", "largest"), [("v5e:32x8", "v5e:16x16"), ("v6e:4x8x16", "v6e:16x16"), ("h100:10000000", "h100:2048")]
)
def test_a_slice_on_which_xla_hangs_or_aborts_is_refused(name: str, largest: str) -> None:
    with pytest.raises(ShardingError, match=f"{name}' is too large to plan for: .* is '{largest}'"):
        chips.slice_of(name)


@pytest.mark.parametrize(("chip", "extra"), [("v6e", "tpu"), ("a100:8", "cuda")])
def test_a_missing_compiler_is_named(chip: str, extra: str) -> None:
    with pytest.raises(ImportError, match=rf"needs the extra {extra} .*pip install"):
        chips.slice_of(chip)


@pytest.mark.usefixtures("cpus")
def test_all_chips_are_a_data_axis(path: Path) -> None:
    found = costs.cost(path, dims={"batch": 4}, chips="two").on_chip
    whole = costs.cost(path, dims={"batch": 4}, chips="two")
    assert whole.mesh == {"data": 2}
    assert found is not None
    assert found.needed is not None
    assert found.needed >= whole.weight_bytes + whole.input_bytes + 2 * 2 * 4
    assert found.fits == (found.needed <= 600)
    flops = 2 * 4 * (4 * 8 + 8 * 2) / 2  # of the products, a device
    assert found.least_seconds >= flops / 1e6
    assert {n.name for n in found.nodes} <= {n.name for n in onnx2jax.convert(path).graph.nodes}
    assert found.kernels > 0


@pytest.mark.usefixtures("cpus")
def test_a_mesh_larger_than_the_slice_is_refused(path: Path) -> None:
    with pytest.raises(ShardingError, match=r"has 4 devices; there are 2"):
        costs.cost(path, {"model": 4}, chips="two")


@pytest.mark.usefixtures("cpus")
def test_the_command_reports_what_does_not_fit(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=1")  # as in the process that it starts
    code = cli.main(["plan", str(path), "--for", "two", "--dim", "batch=64"])
    text = capsys.readouterr().out
    assert code == 1
    assert "a chip of 600 bytes: does not fit: it needs more memory than the chip has" in text
    assert "costliest nodes" in text


def test_a_plan_needs_devices(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(path)]) == 2
    assert "--for v5e:2x2" in capsys.readouterr().err


def test_chips_of_several_hosts_belong_to_the_process_that_compiles_for_them() -> None:
    class CompileOnlyPyClient:
        """Named as XLA names the client of a topology."""

    chips = [SimpleNamespace(client=CompileOnlyPyClient(), process_index=i // 4) for i in range(8)]
    mesh: Any = type("Mesh", (), {"devices": np.array(chips, object), "shape": {"model": 8}})()
    assert processes(mesh) == (jax.process_index(),)
