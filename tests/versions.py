"""The suite on every Python of this machine, and on the lowest versions that pyproject.toml allows.

python -m tests.versions            # all of it, in fresh environments; a table at the end
python -m tests.versions --newest   # what touches JAX's interfaces, on the newest Python alone

Both run where nothing is installed yet: this module wants the standard library only.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / ".venv" / "versions"
MINORS = range(11, 15)
"""Python 3.11 to 3.14; what is not on the machine is left out."""
TOOLS = ("dev", "docs", "engines", "notebooks", "test", "zoo", "zoo-jax")
"""Extras with which the project is worked on; the others are promises to users."""
REQUIREMENT = re.compile(r"([\w-]+)(?:\[.*])?(?:>=|==)([\d.]+)")

NEWEST = (
    "tests/face/test_public.py",  # signatures, which differ between releases of Python
    "tests/face/test_wheel.py",  # the wheel, alone with what it requires
    "tests/model/test_32_bits.py",  # 64 bits inside a caller's own jit, grad and vmap
    "tests/model/calls/test_dispatch.py",
    "tests/model/files/test_export.py",  # jax.export, symbolic extents
    "tests/model/test_transforms.py",
    "tests/eval",
    "tests/jaxpr",  # primitives and their parameters
    "tests/runtime",
    "tests/sharding/test_explicit_axes.py",  # jax.set_mesh, shard_map
    "tests/sharding/test_processes.py",  # jax.distributed
    "tests/generation/test_steps.py",  # donated buffers, loops on the device
)
"""What meets JAX where it differs between releases: its types, transformations, jaxprs, meshes and export. The meaning
of operators, which is most of the suite, is NumPy's and lax's, and has not differed."""


class Row(NamedTuple):
    """What became of the suite in one environment; ``passed`` is None where it could not be installed or run."""

    name: str
    versions: dict[str, str]
    passed: int | None = None
    failed: int = 0


def pythons() -> dict[str, str]:
    """The interpreters with pip and venv, by version: from PATH, then from pyenv.

    Pyenv puts programs into PATH that only say that another version is chosen, so each is asked.
    """
    found = {}
    for minor in MINORS:
        folders = [*os.get_exec_path(), *sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin"), reverse=True)]
        for path in (Path(folder) / f"python3.{minor}" for folder in folders):
            if path.exists() and _says(str(path), "import pip, venv, sys; print(sys.version_info[1])") == str(minor):
                found[f"3.{minor}"] = str(path)
                break
    return found


def lowest(tools: bool = True) -> list[str]:
    """The lowest versions that users may have, as constraints for pip: of the dependencies, and of their extras.

    With the tools of the tests, what these want higher is theirs; onnx does.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    promised = [*project["dependencies"], *(r for name, some in extras.items() if name not in TOOLS for r in some)]
    bounds: dict[str, str] = {}
    for requirement in (*promised, *(extras["test"] if tools else ())):
        match = REQUIREMENT.match(requirement)
        if match is None or (match[1] not in bounds and requirement not in promised):
            continue
        bounds[match[1]] = max(match[2], bounds.get(match[1], "0"), key=_numbers)
    return [f"{name}=={version}" for name, version in bounds.items()]


def run(name: str, python: str, tests: Sequence[str] = (), constraints: Sequence[str] = ()) -> Row:
    """Make an environment, run the suite or a part of it there, and count."""
    folder = ENVIRONMENTS / name
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    print(f"\n{name}: {python}", flush=True)
    constrained = dict(os.environ)
    if constraints:
        constrained["PIP_CONSTRAINT"] = written(folder / "constraints.txt", constraints)
    make = ["make", f"VENV={folder.relative_to(ROOT)}", f"PYTHON={python}", f"TESTS={' '.join(tests)}"]
    make.append("MARKS=not long and not zoo")
    # Constraints are for the environment alone: tests that call pip themselves want other versions.
    if subprocess.run([*make, f"{folder.relative_to(ROOT)}/.test"], cwd=ROOT, env=constrained, check=False).returncode:
        return Row(name, versions(folder))
    options = os.environ | {"PYTEST_ADDOPTS": f"-q --junit-xml={report}"}
    subprocess.run([*make, "pytest"], cwd=ROOT, env=options, check=False)
    if not report.exists():
        return Row(name, versions(folder))
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    counts = [[int(s.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")] for s in suites]
    tests, failures, errors, skipped = map(sum, zip(*counts, strict=True))
    return Row(name, versions(folder), tests - failures - errors - skipped, failures + errors)


def alone(python: str) -> Row:
    """The wheel beside the very lowest versions of what it requires, without the tools of the suite."""
    folder = ENVIRONMENTS / "alone"
    print(f"\nalone: {python}", flush=True)
    constraints = written(folder / "constraints.txt", lowest(tools=False))
    program = str(folder / "bin" / "python")
    made = [python, "-m", "venv", "--without-pip", str(folder)]
    filled = [python, "-m", "pip", "--python", program, "install", "--quiet", "--constraint", constraints, str(ROOT)]
    tried = [program, "-I", str(ROOT / "tests" / "support" / "alone.py")]
    done = all(subprocess.run(command, check=False).returncode == 0 for command in (made, filled, tried))
    return Row("alone", versions(folder), *((1, 0) if done else (0, 1)))


def versions(folder: Path) -> dict[str, str]:
    """What lies in an environment."""
    code = "import importlib.metadata as m\nfor p in ('jax', 'numpy', 'protobuf'): print(m.version(p))"
    return dict(zip(("jax", "numpy", "protobuf"), _says(str(folder / "bin" / "python"), code).split(), strict=False))


def written(path: Path, lines: Sequence[str]) -> str:
    """A file of these lines, by its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def table(rows: Sequence[Row]) -> str:
    """The rows in columns.

    >>> print(table([Row("3.13", {"jax": "0.12.0", "numpy": "2.5.5", "protobuf": "7.36.2"}, 2559, 0), Row("3.14", {})]))
    python  jax      numpy    protobuf  passed  failed
    3.13    0.12.0   2.5.5    7.36.2    2559    0
    3.14    -        -        -         did not run
    """
    lines = ["python  jax      numpy    protobuf  passed  failed"]
    for row in rows:
        jax, numpy, protobuf = (row.versions.get(p, "-") for p in ("jax", "numpy", "protobuf"))
        counts = "did not run" if row.passed is None else f"{row.passed:<8}{row.failed}"
        lines.append(f"{row.name:<8}{jax:<9}{numpy:<9}{protobuf:<10}{counts}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run them; the exit status is 1 where something failed or did not run."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__.split("\n")[0])
    parser.add_argument("--newest", action="store_true", help="a part of the suite on the newest Python alone")
    newest_alone = parser.parse_args(argv).newest
    found = pythons()
    if newest_alone:
        name = max(found, key=_numbers, default="3.0")
        if _numbers(name) <= sys.version_info[:2]:
            print(f"no Python newer than {sys.version_info[0]}.{sys.version_info[1]} with pip on this machine")
            return 0
        rows = [run(name, found[name], NEWEST)]
    else:
        shutil.rmtree(ENVIRONMENTS, ignore_errors=True)
        rows = [run(name, python) for name, python in found.items()]
        oldest = min(found, key=_numbers)
        rows += [run("lowest", found[oldest], constraints=lowest()), alone(found[oldest])]
    print("\n" + table(rows))
    return int(any(row.passed is None or row.failed for row in rows))


def _says(python: str, code: str) -> str:
    """What a program prints; nothing where it fails."""
    try:
        return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


if __name__ == "__main__":
    sys.exit(main())
