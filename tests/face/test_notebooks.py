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

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def execute(path: Path) -> Any:
    """The notebook with fresh outputs, run by this interpreter on this working tree."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        kernel = Path(folder) / "this"
        kernel.mkdir()
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        # With XLA's optimizations, as for users: without them, loops over networks take three times as long.
        env = {"PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
        spec = {"argv": command, "display_name": "this", "language": "python", "env": env}
        (kernel / "kernel.json").write_text(json.dumps(spec))
        specs = KernelSpecManager(kernel_dirs=[folder], ensure_native_kernel=False)
        sockets = str(kernel / "ipc")  # instead of the working tree
        manager = AsyncKernelManager(kernel_name="this", kernel_spec_manager=specs, transport="ipc", ip=sockets)
        client = NotebookClient(notebook, km=manager, timeout=300, record_timing=False, coalesce_streams=True)
        client.owns_km = True  # so that it ends the kernel and closes its sockets
        client.execute()
    notebook.metadata.language_info = {"name": "python"}  # without the Python version
    return notebook


def kinds(notebook: Any) -> list[list[Any]]:
    """The kinds of outputs of each cell."""
    return [[o.get("name") or sorted(o.data) for o in cell.get("outputs", ())] for cell in notebook.cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_reproduces_its_committed_outputs(path: Path) -> None:
    committed = nbformat.read(path, as_version=4)
    assert kinds(execute(path)) == kinds(committed), "run `make notebooks` and commit"


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
            executed = execute(notebook_path)
            nbformat.write(executed, notebook_path)
            picture = notebook_path.parent / "pictures" / f"{notebook_path.stem}.png"
            picture.write_bytes(richest_picture(executed))
            print(f"{notebook_path.name}: done")
