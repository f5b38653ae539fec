"""The index of operators by module, which look-ups import.

python -m tests.ops.test_index   # writes the index, after an operator was added, moved or renamed
"""

from __future__ import annotations

import importlib
import pkgutil
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import Final

from onnx2jax import ops
from onnx2jax.ops import index, registry

TARGET: Final = Path(index.__file__)


def registered() -> dict[tuple[str, str], str]:
    """The module that registers each operator of the package, over all modules there are."""
    for module in pkgutil.walk_packages(ops.__path__, f"{ops.__name__}."):
        importlib.import_module(module.name)
    modules = {key: {v.module for v in versions} - {""} for key, versions in registry._OPERATORS.items()}
    assert all(len(m) <= 1 for m in modules.values()), "a module registers all versions of its operators"
    return {key: next(iter(m)) for key, m in modules.items() if m}


def written() -> str:
    """The text of the index."""
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (domain, name), module in sorted(registered().items()):
        names[module, domain].append(name)
    domains: dict[tuple[str, str], list[str]] = defaultdict(list)  # operators may have equal names in several
    for (module, domain), operators in sorted(names.items()):
        domains[module, " ".join(operators)].append(domain)
    rows = ""
    for (module, words), several in domains.items():
        key = ", ".join(f'"{part}"' for part in (module, *several))
        line = f'    ({key}): "{words}",'
        if len(line) > 120:
            line = textwrap.fill(f'    ({key}): """{words}""",', 120, subsequent_indent=" " * 8)
        rows += line + "\n"
    start, end = "_NAMES: Final[Mapping[tuple[str, ...], str]] = {\n", "}\n\nMODULES"
    source = TARGET.read_text(encoding="utf-8")
    return source[: source.index(start) + len(start)] + rows + source[source.index(end) :]


def test_the_index_lists_every_operator_with_its_module() -> None:
    assert registered() == index.MODULES, "if an operator was added or moved: python -m tests.ops.test_index"


def test_traits_are_of_operators_that_exist() -> None:
    assert {*registry.TRAITS} <= {*index.MODULES}


if __name__ == "__main__":
    TARGET.write_text(written(), encoding="utf-8")
