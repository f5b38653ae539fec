"""Print the mean code lines per operator in onnx2jax/ops: without blank lines, comments and docstrings."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import onnx2jax

IGNORED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """How many lines hold code.

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


def main() -> None:
    files = sorted((Path(onnx2jax.__file__).parent / "ops").glob("*.py"))
    lines = sum(code_lines(file.read_text()) for file in files)
    operators = sum(map(len, onnx2jax.supported().values()))
    print(f"ops/: {lines} code lines for {operators} operators, {lines / operators:.1f} each")


if __name__ == "__main__":
    main()
