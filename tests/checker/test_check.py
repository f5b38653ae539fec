"""``onnx2jax.check`` and ``python -m onnx2jax check``: findings as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import onnx2jax
from docs.make_conformance import rules
from onnx2jax import cli, demo_model
from onnx2jax.checker.report import FIXES
from onnx2jax.errors import ModelError
from tests.support.cases import MAIN, parse

TWO = MAIN + " { a = Cast (x)  y = Relu (a, x) }"


def test_a_finding_has_rule_path_message_and_fix() -> None:
    report = onnx2jax.check(parse(TWO))
    assert not report.ok
    first, second = report.findings
    assert (first.rule, first.severity, first.path) == ("ND-10", "error", "graph 'g', node 'a'")
    assert "lacks attribute 'to'" in first.message and "rule" not in first.message
    assert first.fix == FIXES["ND-10"]
    assert str(report).splitlines() == [str(first), str(second)]
    assert str(first).startswith("error ND-10 graph 'g', node 'a': ")
    with pytest.raises(ModelError, match=r"(?s)ND-10.*ND-08"):
        report.raise_errors()


def test_errors_come_before_warnings() -> None:
    def twice(m: onnx2jax.Model) -> None:
        m.opset_import.add(domain="", version=21)  # type: ignore[attr-defined]

    report = onnx2jax.check(parse(TWO, twice))
    assert [f.severity for f in report.findings] == ["error", "error", "warning"]
    assert len(report.errors) == 2


def test_the_report_as_json() -> None:
    facts = json.loads(onnx2jax.check(parse(TWO)).to_json())
    assert facts["ok"] is False
    assert facts["findings"][0].keys() == {"rule", "severity", "path", "message", "fix"}
    assert json.loads(onnx2jax.check(demo_model()).to_json()) == {"ok": True, "findings": [], "missing": []}


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["check", str(demo_model())]) == 0
    assert capsys.readouterr().out == "no findings\n"
    (tmp_path / "m.onnx").write_bytes(parse(TWO).SerializeToString())
    assert cli.main(["check", str(tmp_path / "m.onnx")]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert cli.main(["check", "--json", str(tmp_path / "m.onnx")]) == 1
    assert json.loads(capsys.readouterr().out)["findings"][1]["rule"] == "ND-08"
    assert cli.main(["check", str(tmp_path / "none.onnx")]) == 1
    assert "none.onnx" in capsys.readouterr().err


def test_an_interrupted_command_has_its_own_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("onnx2jax.cli.verify.check", interrupted)
    assert cli.main(["check", str(demo_model())]) == 130


def test_strict_conversion_lists_all_errors() -> None:
    with pytest.raises(ModelError, match=r"(?s)breaks rules.*ND-10.*ND-08"):
        onnx2jax.convert(parse(TWO), strict=True)


def test_the_number_of_findings_is_bounded() -> None:
    report = onnx2jax.check(parse(MAIN + " { y = Relu (x) " + " ".join(f"v{i} = Cast (x)" for i in range(1500)) + " }"))
    assert len(report.findings) == 1000


def test_fixes_belong_to_existing_rules() -> None:
    assert FIXES.keys() - {""} <= rules().keys()
