"""The notebooks run from top to bottom, and reproduce their committed outputs.

``python tests/face/test_notebooks.py`` executes all or the named notebooks and saves their outputs; the most detailed
picture of each goes into ``notebooks/pictures`` for the list in ``notebooks/README.md``.
"""

from __future__ import annotations

import base64
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from tests.support.helpers import ROOT
from tests.support.tiers import extended

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


CANARY = ("export_and_reload",)
"""The fastest, alone in the main tier."""
GROUPS = (
    CANARY,
    ("shard_over_8_devices", "fine_tune", "probe_a_text_model"),  # the first sets XLA_FLAGS
    ("convert_and_run", "edit_a_model_as_code", "look_inside", "what_only_jax_can_do"),
    ("your_images_your_classes",),
    ("generate_text", "speech", "write_an_operator"),
    ("simulator_inside_nuts", "train_from_training_info", "uncertainty"),
)
"""Notebooks that share a kernel: importing JAX, matplotlib and others takes five seconds in each."""
SMALLER = {
    "fine_tune": {"range(40)": "range(2)", "range(0, 41, 10)": "range(1)"},
    "generate_text": {"steps = 360": "steps = 2"},
    "look_inside": {"split(key, 24)": "split(key, 2)"},
    "simulator_inside_nuts": {"num_warmup=400, num_samples=400": "num_warmup=20, num_samples=20"},
    "speech": {"(8, time.size)": "(2, time.size)", "arange(-15, 31, 5": "arange(-15, 31, 15"},
    "train_from_training_info": {"range(30)": "range(2)"},
    "uncertainty": {"length=500": "length=20"},
    "what_only_jax_can_do": {"length=30": "length=2"},
    "your_images_your_classes": {"epochs = 8": "epochs = 2"},
}
"""Fewer steps of what is repeated: tests compare the kinds of outputs, not numbers and pictures."""
START = "import warnings\nwarnings.outside = warnings.catch_warnings()\nwarnings.outside.__enter__()\n%reset -f"
END = "import warnings\nwarnings.outside.__exit__(None, None, None)\n%reset -f"


def execute(*paths: Path, smaller: bool = False) -> list[Any]:
    """The notebooks with fresh outputs, run in one kernel by this interpreter on this working tree.

    Each begins without names and with the warning filters of a new kernel; what it changes beyond these, it changes for
    those after it.
    """
    notebooks = [nbformat.read(path, as_version=4) for path in paths]
    combined = nbformat.v4.new_notebook()
    for path, notebook in zip(paths, notebooks, strict=True):
        for old, new in SMALLER.get(path.stem, {}).items() if smaller else ():
            (cell,) = (c for c in notebook.cells if old in c.source)
            cell.source = cell.source.replace(old, new)
        ends = [nbformat.v4.new_code_cell(source) for source in (START, END)]
        combined.cells += [ends[0], *notebook.cells, ends[1]]
    with tempfile.TemporaryDirectory() as folder:
        kernel = Path(folder) / "this"
        kernel.mkdir()
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        # With XLA's optimizations, as for users, where loops over networks are long; compiling takes longer with them.
        env = {"PYTHONPATH": str(ROOT), "ONNX2JAX_QUIET": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(smaller))}
        spec = {"argv": command, "display_name": "this", "language": "python", "env": env}
        (kernel / "kernel.json").write_text(json.dumps(spec))
        specs = KernelSpecManager(kernel_dirs=[folder], ensure_native_kernel=False)
        sockets = str(kernel / "ipc")  # instead of the working tree
        manager = AsyncKernelManager(kernel_name="this", kernel_spec_manager=specs, transport="ipc", ip=sockets)
        client = NotebookClient(combined, km=manager, timeout=300, record_timing=False, coalesce_streams=True)
        client.owns_km = True  # so that it ends the kernel and closes its sockets
        client.execute()
    for notebook in notebooks:
        notebook.metadata.language_info = {"name": "python"}  # without the Python version
    return notebooks


def kinds(notebook: Any) -> list[list[Any]]:
    """The kinds of outputs of each cell."""
    return [[o.get("name") or sorted(o.data) for o in cell.get("outputs", ())] for cell in notebook.cells]


@pytest.mark.parametrize("names", [g if g is CANARY else extended(g) for g in GROUPS], ids=lambda names: names[0])
def test_notebooks_reproduce_their_committed_outputs(names: tuple[str, ...]) -> None:
    paths = [ROOT / "notebooks" / f"{name}.ipynb" for name in names]
    for path, executed in zip(paths, execute(*paths, smaller=True), strict=True):
        committed = nbformat.read(path, as_version=4)
        assert kinds(executed) == kinds(committed), f"{path.stem}: run `make notebooks` and commit"


def test_every_notebook_is_in_one_group() -> None:
    assert sorted(name for names in GROUPS for name in names) == [path.stem for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_starts_with_a_summary_and_is_listed(path: Path) -> None:
    first = nbformat.read(path, as_version=4).cells[0]
    assert re.match(r"# .+\n\nWhat you will see: ", first.source)
    listed = (path.parent / "README.md").read_text()
    assert f"({path.name})" in listed and f"(pictures/{path.stem}.png)" in listed
    assert (path.parent / "pictures" / f"{path.stem}.png").exists()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_outputs_contain_pictures_and_no_warnings_or_paths(path: Path) -> None:
    outputs = [o for cell in nbformat.read(path, as_version=4).cells for o in cell.get("outputs", ())]
    assert any("image/png" in o.get("data", {}) for o in outputs)
    assert not any(o.get("name") == "stderr" for o in outputs)
    text = "\n".join(o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in outputs)
    assert not re.search(r"(?<![\w.:/])/(home|opt|root|tmp|usr|var|Users)/|[A-Z]:\\", text)
    assert str(ROOT) not in text


def richest_picture(notebook: Any) -> bytes:
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", ())]
    return base64.b64decode(max((o.data["image/png"] for o in outputs if "image/png" in o.get("data", {})), key=len))


if __name__ == "__main__":
    for notebook_path in NOTEBOOKS:
        if not sys.argv[1:] or notebook_path.stem in sys.argv[1:]:
            (executed,) = execute(notebook_path)
            nbformat.write(executed, notebook_path)
            picture = notebook_path.parent / "pictures" / f"{notebook_path.stem}.png"
            picture.write_bytes(richest_picture(executed))
            print(f"{notebook_path.name}: done")
