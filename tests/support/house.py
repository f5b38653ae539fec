"""Reports the architecture: packages by layer with code lines and imports, and code lines per operator.

Blank lines, comments and docstrings are not counted. The lint step runs this; it fails above the ratchet.

python -m tests.support.house
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Final

import onnx2jax

LAYERS: Final = (
    ("face", ("", "__main__", "backend", "cli", "data", "demo", "session")),
    ("training", ("training", "generation")),
    ("model", ("model",)),
    ("side by side", ("checker", "sharding", "runtime")),
    ("evaluation", ("eval", "jaxpr")),
    ("ir", ("ir",)),
    ("ops", ("ops",)),
    ("proto", ("proto",)),
    ("ground", ("errors", "compat", "debug", "lazy", "limits", "printed", "progress")),
)
"""Layers, top down. A module imports from its own package and from layers below (tests/test_architecture.py)."""
MOST_LINES_PER_OPERATOR: Final = 20.4
"""The ratchet. It was 14.4 before operators of language models with caches, packed weights, forests laid out for
walking and tables of ai.onnx.ml, 18.2 before the lowering of convolutions for CPUs moved here from the runtime, and
19.2 before attention by blocks, scatters of rows and other forms for accelerators, loops with counted trips, and slices
from traced starts, 19.7 before NaN stayed out of what does not read it, and shapes of operands had a table, and 20.1
before edge values were compared with both references, and XLA no longer folded known indices while it compiles, and
20.2 before an index said which module defines an operator, so that others are not imported; 20.5 before modules read
together became one."""

IGNORED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
GENERATED: Final = frozenset({"ops.index"})
"""Modules that a command writes, whose lines are not counted."""
PACKAGE: Final = Path(onnx2jax.__file__).parent


def code_lines(source: str) -> int:
    """The number of lines with code.

    >>> code_lines('# comment\\n\\nx = (\\n    1\\n)\\n"a docstring"\\n')
    3
    """
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in IGNORED
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


@cache
def modules() -> dict[str, Path]:
    """Each module by its dotted name inside the package; the package itself is "".

    >>> modules()["ir.graph"].name
    'graph.py'
    """
    files = {".".join(p.relative_to(PACKAGE).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}
    return {"" if n == "__init__" else n.removesuffix(".__init__"): p for n, p in files.items()}


@lru_cache(maxsize=1)
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file; the last one is kept, for callers that read it more than once."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(module: str, path: Path) -> Iterator[str]:
    """The absolute names that a module imports, anywhere in the file."""
    here = ["onnx2jax", *filter(None, module.split("."))]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = node.level - (path.name == "__init__.py")
            base = here[: len(here) - up] if node.level else []
            dotted = ".".join([*base, *([node.module] if node.module else [])])
            yield dotted
            yield from (f"{dotted}.{a.name}" for a in node.names)


def package_of(name: str) -> str:
    """The subpackage of a dotted name inside the package; "" for the public names.

    >>> package_of("ir.graph.Graph"), package_of("convert")
    ('ir', '')
    """
    first = name.split(".")[0]
    return first if any(first in packages for _, packages in LAYERS) else ""


def arrows() -> dict[str, set[str]]:
    """The subpackages that each subpackage imports from."""
    found: dict[str, set[str]] = {package: set() for _, packages in LAYERS for package in packages}
    for module, path in modules().items():
        inner = (name.removeprefix("onnx2jax.") for name in imports(module, path) if name.startswith("onnx2jax."))
        found[package_of(module)].update(package_of(name) for name in inner)
    return {package: targets - {package} for package, targets in found.items()}


def main() -> int:
    """Print the report; 1 if operators take more lines than the ratchet allows."""
    lines: Counter[str] = Counter()
    for module, path in ((m, p) for m, p in modules().items() if m not in GENERATED):
        lines[package_of(module)] += code_lines(path.read_text(encoding="utf-8"))
    targets = arrows()
    for layer, packages in LAYERS:
        print(f"{layer}:")
        for package in packages:
            below = ", ".join(n for _, names in LAYERS for n in names if n in targets[package])
            print(f"  {package or 'onnx2jax':<9} {lines[package]:>5} lines" + (f"  -> {below}" if below else ""))
    compiler = sum(n for package, n in lines.items() if package not in ("ops", "proto", "checker"))
    operators = sum(map(len, onnx2jax.supported().values()))
    each = lines["ops"] / operators
    print(f"{sum(map(len, targets.values()))} arrows between {len(targets)} packages, none upwards")
    print(f"{sum(lines.values())} code lines, {compiler} of them the compiler's (without ops, proto, checker)")
    print(f"ops/: {lines['ops']} code lines for {operators} operators, {each:.1f} each")
    if each > MOST_LINES_PER_OPERATOR:
        print(f"more than {MOST_LINES_PER_OPERATOR} lines per operator: take lines away before adding some")
    return int(each > MOST_LINES_PER_OPERATOR)


if __name__ == "__main__":
    sys.exit(main())
