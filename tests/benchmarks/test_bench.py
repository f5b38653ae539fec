"""The benchmark's command, page, memory and program reports; timings are not tested."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnx2jax
from benchmarks import bench, gate, groups, harness, models, notes, passes, report, rivals, sizes, startup, thunks
from benchmarks.groups import Settings
from benchmarks.net import Net
from onnx2jax.jaxpr import pipeline
from tests.support.models import text_model

FIGURES = {
    "machine": {
        "processor": "a processor",
        "cores": 2,
        "instructions": ["avx2"],
        "system": "Linux",
        "versions": {"jax": "1"},
    },
    "groups": {
        "networks": {
            "fast": {
                "seconds": {
                    "onnx2jax": {"median": 0.001, "quartiles": [0.0009, 0.0012]},
                    "onnxruntime": {"median": 0.002, "quartiles": [0.002, 0.002]},
                },
                "ratios": {"onnxruntime": {"of_medians": 2.0, "paired": [1.9, 2.0, 2.1]}},
                "load": [0.1, 0.3],
            },
            "slow": {
                "seconds": {
                    "onnx2jax": {"median": 0.2, "quartiles": [0.2, 0.2]},
                    "JAX by hand": {"median": 0.1, "quartiles": [0.1, 0.1]},
                },
                "ratios": {"JAX by hand": {"of_medians": 0.5, "paired": [0.5, 0.5, 0.5]}},
                "load": [0.2, 0.3],
            },
            "wrong": {"error": "Mismatch: wrong: onnx2jax differs"},
        }
    },
}


def test_the_page_links_slower_rows_to_one_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = notes.Explanation("Waiting, for memory", "It waits.", ("Not waiting: no gain.",))
    monkeypatch.setitem(notes.NOTES, "networks/slow", (waits,))
    monkeypatch.setattr(report, "EXPLANATIONS", (waits, notes.HOST))
    page = report.page(FIGURES)
    assert "| fast | 1 (0.9 to 1.2) | 2 / **2.00** |  |  |" in page
    assert "|  | 100 / **0.50** | [Waiting, for memory](#waiting-for-memory) |" in page
    assert page.count("### Waiting, for memory\n\nIt waits.") == 1
    assert notes.HOST.text not in page
    assert "- **wrong**: Mismatch: wrong: onnx2jax differs" in page
    assert "Load average while measuring: 0.1 to 0.2." in page


def test_large_files_have_a_table_of_their_own() -> None:
    ours = {"convert wall": 1.0, "call wall": 2.0, "convert work": 1.0, "call work": 2.5, "compile work": 1.5}
    theirs = {"convert wall": 0.5, "call wall": 0.25, "convert work": 0.5, "call work": 0.25}
    row = {"onnx2jax": {**ours, "before": 1e9, "peak": 2e9}, "onnxruntime": {**theirs, "before": 1e9, "peak": 1.5e9}}
    page = report.page({**FIGURES, "groups": {"sizes": {"1,000 nodes": {"sizes": row}}}})
    assert "| 1,000 nodes | 3.00 (1.00 + 1.00 + 1.50) | 1.00 | 0.75 (0.50 + 0.25) | 0.50 |" in page


def test_files_of_growing_size_are_made(tmp_path: Path) -> None:
    network = sizes.nodes(tmp_path, 40)
    model = onnx2jax.convert(network.path)
    assert 40 <= len(model.graph.nodes) < 60
    assert np.isfinite(model.run(None, dict(network.feeds))[0]).all()
    wide = sizes.weights(tmp_path, 1)
    np.testing.assert_allclose(onnx2jax.convert(wide.path).run(None, dict(wide.feeds))[0].std(), 1, rtol=0.1)


def test_the_summary_groups_models_by_class() -> None:
    row = FIGURES["groups"]["networks"]["fast"]  # type: ignore[index]
    groups = {"networks": {"bert, batch 1": row}, "models": {"xgb_digits": row, "a file": row}}
    assert {kind: [n for _, n in rows] for kind, rows in report.by_class(groups).items()} == {
        "Transformers": ["bert, batch 1"],
        "Tree ensembles": ["xgb_digits"],
        "Small networks": ["a file"],
    }
    page = report.page({**FIGURES, "groups": groups})
    assert "| Tree ensembles | onnx2jax | 1 | **2.00** (2.00 to 2.00) | xgb_digits 2.00 | xgb_digits 2.00 |" in page


def test_the_summary_has_columns_of_releases_and_processors() -> None:
    def figures(jax: str, ratio: float, *names: str, sets: Sequence[str] = ()) -> dict[str, Any]:
        row = json.loads(json.dumps(FIGURES["groups"]["networks"]["fast"]))  # type: ignore[index]
        row["ratios"]["onnxruntime"]["paired"] = [ratio] * 3
        machine = {**FIGURES["machine"], "instructions": ["avx2", *sets], "versions": {"jax": jax}}  # type: ignore[dict-item]
        return {"machine": machine, "groups": {"models": dict.fromkeys(names, row)}}

    newest, own = figures("0.12.0.1", 2, "xgb_digits"), figures("0.10.2", 0.5, "xgb_digits", "a file")
    page = report.page(own, None, [newest, own, figures("0.10.2", 4, "xgb_digits", sets=["avx_vnni"])])
    head = " | ".join(f"{name}: median (quartiles)" for name in ("jax 0.12", "jax 0.10", "with avx_vnni, jax 0.10"))
    assert f"| class | on a CPU pick | rows | {head} |" in page
    medians = " | ".join(f"**{m}.{n}** ({m}.{n} to {m}.{n})" for m, n in ((2, "00"), (0, "50"), (4, "00")))
    assert f"| Tree ensembles | onnx2jax | 1 | {medians} |" in page
    assert "| Small networks | onnxruntime | 1 | - | **0.50** (0.50 to 0.50) | - | a file 0.50 | a file 0.50 |" in page
    assert "| all: geometric mean |  |  | **2.00** of 1 | **0.50** of 2 | **4.00** of 1 |  |  |" in page


def test_the_plot_is_deterministic(tmp_path: Path) -> None:
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    figures = {"groups": {"models": FIGURES["groups"]["networks"]}}  # type: ignore[index]
    assert report.plot(figures, first) and report.plot(figures, second)
    assert first.read_bytes() == second.read_bytes()
    assert not report.plot({"groups": {}}, first)


def test_unmeasured_rows_keep_their_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"networks": lambda _: iter([("fast", lambda: {"error": "now"}), ("slow", lambda: {"error": "now"})])}
    monkeypatch.setattr(bench, "GROUPS", rows)
    file = tmp_path / "figures.json"
    file.write_text(json.dumps(FIGURES))
    assert bench.main(["--only", "networks/slow", "--json", str(file)]) == 1
    kept = json.loads(file.read_text())["groups"]["networks"]
    assert kept["fast"] == FIGURES["groups"]["networks"]["fast"]  # type: ignore[index]
    assert kept["slow"] == {"error": "now"}
    assert "# Performance" in file.with_suffix(".md").read_text()


def test_an_error_becomes_a_row() -> None:
    def fails() -> dict[str, object]:
        raise ValueError("first line\nsecond")

    assert bench.guarded(fails) == {"error": "ValueError: first line"}


def test_the_page_contains_no_local_paths() -> None:
    def fails() -> Any:
        raise ValueError("Load model from /some/folder/name/model.onnx failed: 1/2 and https://a.b/c stay")

    said = "ValueError: Load model from model.onnx failed: 1/2 and https://a.b/c stay"
    assert bench.guarded(fails) == {"error": said}


def test_row_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--list"]) == 0
    keys = capsys.readouterr().out.splitlines()
    assert len(keys) == len(set(keys)) > 60
    assert {"networks/gpt2_step, batch 8", "calls/500 weights of 4 numbers", "ready/bert, batch 1"} <= {*keys}
    assert {k.split("/")[0] for k in notes.NOTES} <= groups.GROUPS.keys()


def test_finding_models_and_inputs_in_folders(tmp_path: Path) -> None:
    folder = tmp_path / "some" / "model_of_mine"
    folder.mkdir(parents=True)
    net = Net(17, ir=8)
    y = net("Add", net.input("a", ["n", 3]), net.input("b", [3]))
    net.save(folder, y)
    ((name, path),) = models.found([tmp_path])
    assert (name, path) == ("model_of_mine", folder / "model.onnx")
    model = onnx2jax.convert(path)
    assert {n: v.shape for n, v in models.inputs(path, model).items()} == {"a": (1, 3), "b": (3,)}
    stored = {"a": np.ones((2, 3), np.float32), "b": np.zeros(3, np.float32)}
    (folder / "test_data_set_0").mkdir()
    for i, array in enumerate(stored.values()):
        onnx.save_tensor(onnx.numpy_helper.from_array(array), folder / "test_data_set_0" / f"input_{i}.pb")
    read = models.inputs(path, model)
    assert {n: v.tolist() for n, v in read.items()} == {n: v.tolist() for n, v in stored.items()}


def test_live_activation_bytes(tmp_path: Path) -> None:
    """x, Exp(x) and their sum: three tensors are live while Add runs."""
    net = Net(17, ir=8)
    x = net.input("x", [100])
    y = net("Add", net("Exp", x), x)
    path = net.save(tmp_path, net("Add", y, net.weight(100)))
    assert models.live_bytes(path) == 3 * 400


def test_a_process_reports_itself(tmp_path: Path) -> None:
    inputs = tmp_path / "inputs.npz"
    np.savez(inputs, image=np.zeros((1, 1, 8, 8), np.float32))
    (tmp_path / "cache").mkdir()
    ours = startup.measured("ours", onnx2jax.demo_model(), inputs, 1, tmp_path / "cache")
    assert ours["peak"] > ours["before"] > 0
    assert ours["weights"] == sum(v.nbytes for v in onnx2jax.convert(onnx2jax.demo_model()).params.values())
    assert [*(tmp_path / "cache").iterdir()]


@pytest.mark.extended
def test_the_error_of_a_measured_process_is_raised(tmp_path: Path) -> None:
    inputs = tmp_path / "inputs.npz"
    np.savez(inputs, image=np.zeros((1, 1, 8, 8), np.float32))
    with pytest.raises(RuntimeError, match=r"onnxruntime: .*missing"):
        startup.measured("onnxruntime", tmp_path / "missing.onnx", inputs, 1)


def test_origins_of_operations(tmp_path: Path) -> None:
    text = '  %fusion.1 = f32[3]{0} fusion(%a), kind=kLoop, metadata={op_name="jit(net)/Relu_1/max" stack_frame_id=1}\n'
    (tmp_path / "module_0001.jit_net.cpu_after_optimizations.txt").write_text(text)
    origins = thunks.origins(tmp_path)
    assert origins == {"jit_net/fusion.1": "jit(net)/Relu_1/max"}
    table = thunks.table({"jit_net/fusion.1": 3e-3, "jit_net/copy": 1e-3}, origins, most=1)
    assert table.splitlines()[1].split() == ["3.000", "75.0%", "jit_net/fusion.1", "jit(net)/Relu_1/max"]
    assert table.splitlines()[2].split() == ["1.000", "25.0%", "1", "others"]


def test_a_trace_names_operations() -> None:
    model = onnx2jax.convert(onnx2jax.demo_model())
    feeds = {"image": np.zeros((1, 1, 8, 8), np.float32)}
    model.run(None, feeds)
    spent = thunks.traced(lambda: model.run(None, feeds), 2)
    assert spent and all(name.startswith("jit_") and "/" in name for name in spent)


def test_the_gate_measures_again_before_failing(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds_asked = []

    def compare(_calls: object, rounds: int, **_: object) -> harness.Comparison:
        rounds_asked.append(rounds)
        ours = (1.0 if rounds > gate.ROUNDS[0] else 2.0,) * rounds
        timings = {rivals.OURS: harness.Timing(ours, ours), rivals.BY_HAND: harness.Timing((1.0,) * rounds, ours)}
        return harness.Comparison(timings, (0.0, 0.0))

    monkeypatch.setattr(gate, "compare", compare)
    assert gate.judged({}) == (1.0, 1.0)
    assert rounds_asked == [*gate.ROUNDS[:2]]


@pytest.mark.parametrize(("work", "wall", "slow"), [(0.89, 2, True), (0.91, 0.8, False), (1, 0.7, True)])
def test_the_gate_checks_processor_and_wall_time(work: float, wall: float, slow: bool) -> None:
    assert gate.Verdict(work, wall).slow(0.9) is slow
    assert not gate.Verdict(work, wall).slow(0.7)


def test_quick_settings() -> None:
    assert Settings().rounds > 3
    assert bench.arguments(["--quick", "--only", "a", "--only", "b", "folder"]).only == ["a", "b"]


def test_every_pass_is_measured() -> None:
    assert {*passes.CASES} == {p.name for p in pipeline.PASSES}
    assert {*passes.TRAINING} == {p.name for p in pipeline.TRAINING_PASSES}


@pytest.mark.parametrize(("work", "wall", "fails"), [(2.0, 2.0, True), (2.0, 0.9, False), (0.5, 2.0, False)])
def test_files_that_passes_slow_down_fail_the_command(
    work: float, wall: float, fails: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = {passes.WITH: (wall, work), passes.WITHOUT: (1.0, 1.0)}

    def compare(calls: Any, **_: Any) -> harness.Comparison:
        return harness.Comparison({n: harness.Timing((taken[n][0],), (taken[n][1],)) for n in calls}, (0.0, 0.0))

    monkeypatch.setattr(passes, "compare", compare)
    with pytest.raises(SystemExit) as exit:
        passes.main(["--models", str(onnx2jax.demo_model())])
    assert ("digits" in str(exit.value.code)) is fails
    assert f"| {work:.2f} | {wall:.2f} |" in capsys.readouterr().out


def test_a_file_that_drawn_inputs_do_not_fit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "m (float[2, n] x, float[3, k] z) => (float[i, j] y) { y = Concat<axis = 1>(x, z) }"
    onnx.save(text_model(text), tmp_path / "m.onnx")
    assert passes.slowed_down([tmp_path / "m.onnx"], 1) == []
    assert "not measured: node" in capsys.readouterr().out
