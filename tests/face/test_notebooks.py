"""The notebooks run from top to bottom, and what is committed in them is what they give.

``python tests/face/test_notebooks.py`` executes them and keeps the outputs.
"""

from __future__ import annotations

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
        spec = {"argv": command, "display_name": "this", "language": "python", "env": {"PYTHONPATH": str(ROOT)}}
        (kernel / "kernel.json").write_text(json.dumps(spec))
        specs = KernelSpecManager(kernel_dirs=[folder], ensure_native_kernel=False)
        sockets = str(kernel / "ipc")  # where else they would lie in the working tree
        manager = AsyncKernelManager(kernel_name="this", kernel_spec_manager=specs, transport="ipc", ip=sockets)
        client = NotebookClient(notebook, km=manager, timeout=300, record_timing=False, coalesce_streams=True)
        client.owns_km = True  # so that it ends the kernel and closes its sockets
        client.execute()
    notebook.metadata.language_info = {"name": "python"}  # without the version of whoever ran it
    return notebook


def kinds(notebook: Any) -> list[list[Any]]:
    """For each cell, what sort of outputs it has."""
    return [[o.get("name") or sorted(o.data) for o in cell.get("outputs", ())] for cell in notebook.cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs_and_gives_what_is_committed(path: Path) -> None:
    committed = nbformat.read(path, as_version=4)
    assert kinds(execute(path)) == kinds(committed), "run `make notebooks` and commit"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_outputs_hold_pictures_and_no_paths(path: Path) -> None:
    outputs = [o for cell in nbformat.read(path, as_version=4).cells for o in cell.get("outputs", ())]
    assert any("image/png" in o.get("data", {}) for o in outputs)
    text = "\n".join(o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in outputs)
    assert not re.search(r"(?<![\w.:/])/(home|opt|root|tmp|usr|var|Users)/|[A-Z]:\\", text)
    assert str(ROOT) not in text


if __name__ == "__main__":
    for notebook_path in NOTEBOOKS:
        nbformat.write(execute(notebook_path), notebook_path)
        print(f"{notebook_path.name}: done")
