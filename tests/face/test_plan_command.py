"""The command ``plan``: estimates costs on absent devices, from a file without its weights."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from contextlib import nullcontext
from pathlib import Path

import onnx
import pytest

from onnx2jax import cli, convert, demo_decoder
from onnx2jax.errors import ExternalDataError, InputNameError, OperatorError, ShardingError
from onnx2jax.model.caches import step_extents
from onnx2jax.model.devices.cost import cost
from tests.support.models import mlp, text_model


@pytest.fixture
def described(tmp_path: Path) -> Path:
    """x [batch, 4] -> Gemm, Relu, MatMul, Add; its external data file is missing."""
    path = tmp_path / "model.onnx"
    onnx.save(mlp(), path, save_as_external_data=True, location="weights", size_threshold=0)
    (tmp_path / "weights").unlink()
    return path


def test_more_devices_than_available(described: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mesh = "data=3,model=4"
    assert cli.main(["plan", str(described), "--mesh", mesh, "--plan", "data+tensor", "--dim=batch=24", "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    weights = (4 * 2 + 2 + 2 * 2 + 2) * 4  # w1 by columns and its bias, w2 by rows, b2 replicated
    sizes = {"parameters": 4 * 8 + 8 + 8 * 2 + 2, "weight_bytes": weights, "input_bytes": 8 * 4 * 4}
    assert {n: facts[n] for n in ("mesh", "dims", *sizes)} == {
        **{"mesh": {"data": 3, "model": 4}, "dims": {"batch": 24}},
        **sizes,
    }
    assert facts["exchanges"] == [{"kind": "all-reduce", "number": 1, "bytes": 8 * 2 * 4}]
    assert facts["flops"] >= 2 * 8 * (4 * 2 + 2 * 2)


def test_plans_in_a_process_with_devices(described: Path) -> None:
    whole = cost(described, {"data": 2}, dims={"batch": 8})
    assert (whole.weight_bytes, whole.input_bytes, whole.exchanges) == (58 * 4, 4 * 4 * 4, ())
    stages = cost(described, {"stage": 2, "data": 2})
    assert stages.dims == {"batch": 4}
    assert stages.weight_bytes == (4 * 8 + 8) * 4
    assert [(e.kind, e.number, e.bytes) for e in stages.exchanges] == [("between stages", 1, 2 * 8 * 4)]
    parts = cost(described, {"data": 2}, "fsdp", compiled=False)
    assert (parts.weight_bytes, parts.flops, parts.scratch_bytes, parts.exchanges) == (58 * 2, None, None, ())
    with pytest.raises(InputNameError, match=re.escape("dims names ['rows']; the model's dimension variables")):
        cost(described, {"data": 2}, dims={"rows": 8})
    assert [p.name for p in described.parent.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize("location", ["../victim", "{folder}/victim", "", "weights"])
def test_no_file_is_written_but_in_a_temporary_folder(
    described: Path, location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, temporary = described.parent / "inner", described.parent / "temporary"
    inner.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    (temporary / "victim").write_text("precious")
    proto = onnx.load(described, load_external_data=False)
    proto.graph.initializer[0].external_data[0].value = location.format(folder=described.parent)
    onnx.save(proto, inner / "m.onnx")
    with nullcontext() if location == "weights" else pytest.raises(ExternalDataError, match=r"outside|no location"):
        cost(inner / "m.onnx", {"data": 1}, compiled=False)
    assert (temporary / "victim").read_text() == "precious"
    assert {p.name for p in (*temporary.iterdir(), *described.parent.iterdir(), *inner.iterdir())} == {
        *("victim", "model.onnx", "inner", "temporary", "m.onnx"),
    }


@pytest.mark.parametrize("location", ["b1/inner", "n" * 300])
def test_a_location_where_no_file_can_be(tmp_path: Path, location: str) -> None:
    onnx.save(mlp(), tmp_path / "m.onnx", save_as_external_data=True, all_tensors_to_one_file=False, size_threshold=0)
    proto = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    proto.graph.initializer[0].external_data[0].value = location
    onnx.save(proto, tmp_path / "m.onnx")
    with pytest.raises(ExternalDataError, match=f"no file of external data can be at '{location[:70]}"):
        cost(tmp_path / "m.onnx", {"data": 1}, compiled=False)


def test_external_data_of_which_a_part_is_missing(tmp_path: Path) -> None:
    onnx.save(mlp(), tmp_path / "m.onnx", save_as_external_data=True, all_tensors_to_one_file=False, size_threshold=0)
    (tmp_path / "w1").unlink()
    assert cost(tmp_path / "m.onnx", {"data": 1}, compiled=False).parameters == 58
    (tmp_path / "model").mkdir()
    (tmp_path / "m.onnx").rename(tmp_path / "model" / "m.onnx")
    (tmp_path / "model" / "w2").symlink_to(tmp_path / "w2")
    with pytest.raises(ExternalDataError, match="link"):
        cost(tmp_path / "model" / "m.onnx", {"data": 1}, compiled=False)
    assert cost(tmp_path / "model" / "m.onnx", {"data": 1}, compiled=False, follow_links=True).parameters == 58


def test_a_table(described: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")  # as in the subprocess of the command
    assert cli.main(["plan", str(described), "--mesh=model=2", "--plan=tensor"]) == 0
    text = capsys.readouterr().out
    assert "mesh model: 2, plan tensor; batch=1" in text, "no devices share the batch"
    assert re.search(r"bytes of weights per device +120\n", text)
    assert re.search(r"all-reduce +1 +8\n", text)


@pytest.mark.parametrize("mesh", ["data", "data=0", "data=2,data=2", "data=x"])
def test_invalid_meshes_are_errors(mesh: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "model.onnx", "--mesh", mesh]) == 2
    assert f"--mesh {mesh}: expected" in capsys.readouterr().err


@pytest.mark.parametrize("devices", [["--mesh=data=100000"], ["--mesh=data=2,model=1025", "--for=h100:4096"]])
def test_a_mesh_that_would_be_listed_for_minutes_is_an_error(
    devices: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    assert cli.main(["plan", "model.onnx", *devices]) == 2
    assert "devices; a plan takes at most 2048: use a smaller mesh" in capsys.readouterr().err


def test_a_mesh_without_devices_or_with_too_many_is_an_error(described: Path) -> None:
    with pytest.raises(ShardingError, match="has an axis without devices"):
        cost(described, {"data": 0, "model": 2})
    with pytest.raises(ShardingError, match=r"use a smaller mesh$"):
        cost(described, {"data": 10**30})


def test_it_says_when_nothing_is_sharded(
    described: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")  # as in the subprocess of the command
    command = ["plan", str(described), "--weights-only"]
    for flags, fix in (
        (["--mesh=data=3", "--dim=batch=4"], ["--dim", "batch=3"]),
        (["--mesh=model=3", "--plan=tensor"], ["--mesh", "model=2"]),
        (["--mesh=data=3", "--dim=batch=4", "--plan=data"], ["--dim", "batch=3"]),
    ):
        assert cli.main([*command, *flags]) == 0
        assert capsys.readouterr().err.endswith(f"holds all weights and inputs. Try {' '.join(fix)}\n")
        assert cli.main([*command, *flags, *fix]) == 0
        assert "nothing is sharded" not in capsys.readouterr().err
    assert not cost(described, {"data": 2}, dims={"batch": 3}, compiled=False).sharded


def test_an_extent_that_no_operator_decides_is_not_inferred() -> None:
    model = convert(text_model("g (float[n, c, d] x) => (float[e, f, h] y) { y = Concat <axis = 2> (x, x) }"))
    assert step_extents(model, {}) == {}


def test_extents_of_a_decoder_are_those_of_a_step(tmp_path: Path) -> None:
    proto = onnx.load(demo_decoder())
    for v in (v for v in proto.graph.input if v.name.startswith("past")):
        v.type.tensor_type.shape.dim[3].dim_param = "size"
    onnx.save(proto, tmp_path / "m.onnx")
    estimate = cost(tmp_path / "m.onnx", {"model": 2}, "tensor", dims={"past_sequence_length": 7})
    lengths = {"sequence_length": 1, "total_sequence_length": 8, "past_sequence_length": 7}
    assert estimate.dims == {"batch_size": 1, **lengths, "size": 16} and estimate.flops
    model = convert(tmp_path / "m.onnx")
    with pytest.raises(OperatorError, match=re.escape("summary(dims={'size': 16, 'total_sequence_length': 2})")):
        model.summary()
    assert model.summary(dims={"size": 16, "total_sequence_length": 2}).flops
