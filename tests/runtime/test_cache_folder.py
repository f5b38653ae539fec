"""The user's folder of compiled programs: where it is, who may write it, what it keeps."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import onnx
import pytest
from onnx import parser

import onnx2jax
from onnx2jax import cli, compat
from onnx2jax.runtime import cache_folder, compile

pytestmark = [
    pytest.mark.usefixtures("one_cpu"),
    pytest.mark.skipif(sys.platform != "linux", reason="the folder, and its mode and owner, are those of Linux"),
]
X = np.ones((2, 4), np.float32)


def model(body: str) -> onnx.ModelProto:
    return parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (float[n, 4] x) => (float[n, 4] y) {{ {body} }}'
    )


ERF = model("y = Erf(x)")
"""Which NumPy does not have; what it has is not stored, where it runs sooner."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, in an empty home."""
    monkeypatch.delenv("ONNX2JAX_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = cache_folder.users_folder()
    assert found == tmp_path / "onnx2jax"
    return found


def test_the_folder_follows_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    for environment, platform, wanted in (
        ({"XDG_CACHE_HOME": "/caches"}, "linux", "/caches/onnx2jax"),
        ({"XDG_CACHE_HOME": "relative"}, "linux", "/home/me/.cache/onnx2jax"),
        ({}, "linux", "/home/me/.cache/onnx2jax"),
        ({"XDG_CACHE_HOME": "/caches"}, "darwin", "/home/me/Library/Caches/onnx2jax"),
        ({"LOCALAPPDATA": "/local"}, "win32", "/local/onnx2jax"),
    ):
        found = cache_folder.users_folder(environment, platform)
        assert found is not None and found.as_posix() == wanted


def test_programs_are_stored_without_being_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By ``convert``, in a folder that only the user can write; the command counts and clears them."""
    np.testing.assert_array_equal(onnx2jax.convert(model("y = Neg(x)")).run(None, {"x": X})[0], -X)
    assert not cache_folder.contents(folder).entries
    onnx2jax.convert(ERF, cache_dir=None).run(None, {"x": X})
    assert not cache_folder.contents(folder).entries
    wanted = onnx2jax.convert(ERF).run(None, {"x": X})[0]
    assert len(cache_folder.contents(folder).entries) == 1 and folder.stat().st_mode & 0o777 == 0o700

    with monkeypatch.context() as patch:
        patch.setattr(compile, "evaluate", None)  # tracing would fail
        np.testing.assert_array_equal(onnx2jax.convert(ERF).run(None, {"x": X})[0], wanted)
    for option in ([], ["--clear"], []):
        assert cli.main(["cache", "--json", *option]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["folder"] == str(folder)
        assert said["programs"] == (0 if said["bytes"] == 0 else 1)
    assert said["programs"] == 0

    with monkeypatch.context() as patch:
        patch.setattr(compat, "keeps_programs", lambda: True)  # JAX's own cache is on
        onnx2jax.convert(ERF).run(None, {"x": X})
    assert not cache_folder.contents(folder).entries


def test_a_folder_that_others_can_write_is_refused_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    folder.chmod(0o770)
    with pytest.warns(UserWarning, match=r"can be written by other users \(mode 770\).*ONNX2JAX_CACHE_DIR="):
        assert not cache_folder.is_private(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not cache_folder.is_private(folder)
        onnx2jax.convert(ERF).run(None, {"x": X})
    assert not list(folder.iterdir())
    folder.chmod(0o700)
    assert cache_folder.is_private(folder)
    monkeypatch.setattr(cache_folder, "_refused", set())
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.warns(UserWarning, match="belongs to another user"):
        assert not cache_folder.is_private(folder)


def test_a_home_that_cannot_be_written_is_no_reason_for_a_warning(folder: Path) -> None:
    folder.parent.joinpath("onnx2jax").write_text("a file")
    assert not cache_folder.is_private(folder)
    np.testing.assert_allclose(onnx2jax.convert(ERF).run(None, {"x": X})[0], 0.842701, rtol=1e-5)


def test_the_least_recently_used_programs_go_first(tmp_path: Path) -> None:
    for i, name in enumerate(("old", "used", "new")):
        path = tmp_path / f"{name}.program"
        path.write_bytes(bytes(100))
        os.utime(path, (i, i))
    os.utime(tmp_path / "old.program")  # as reading does
    for name, age in ((".a.tmp", 0), (".b.tmp", None), ("other", 0)):
        (tmp_path / name).write_bytes(bytes(100))
        if age is not None:
            os.utime(tmp_path / name, (age, age))
    cache_folder.trim(tmp_path, 200)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".b.tmp", "new.program", "old.program", "other"]


def test_options_of_jax_that_change_programs_are_part_of_the_key() -> None:
    before = compat.process_options()
    for name, matters in (("jax_disable_most_optimizations", True), ("jax_log_compiles", False)):
        value = jax.config.values[name]  # type: ignore[attr-defined]
        jax.config.update(name, not value)
        changed = compat.process_options()
        jax.config.update(name, value)
        assert (changed != before) == matters
