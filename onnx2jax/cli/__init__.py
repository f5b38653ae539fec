"""At a terminal: ``onnx2jax run model.onnx`` and others; each command has a module of its own here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..errors import OnnxError
from . import check, draw, export, generate, inspect, run, summary, verify
from .terminal import CommandError

COMMANDS = (run, inspect, summary, check, verify, export, draw, generate)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0: done. 1: the model or the data is at fault, and standard error says how. 2: the command line is.
    1 also: ``check`` found errors. 3: ``inspect`` found operators that nothing serves.
    """
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.command(arguments)
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OnnxError, OSError, ImportError) as error:
        print("\n".join([f"error: {_said(error)}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return 1
    return status


def _said(error: Exception) -> str:
    """What an error says, without the number that the operating system gives it."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="onnx2jax", description="Run, inspect, check and verify ONNX models, and generate text with them."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser
