"""The command line: ``onnx2jax run model.onnx`` and other commands, one module each."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

import jax

from .. import __version__
from ..errors import OnnxError
from .terminal import CommandError, Parser

_NAMES: Final = (
    "run inspect summary check verify bench profile plan train generate export join simplify source view draw "
    "operators cache demo"
)
COMMANDS: Final = [import_module(f"{__name__}.{name}") for name in _NAMES.split()]
"""Modules with one command each, in the order of the help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0: success. 1: the model or the data is invalid (the reason is on standard error), ``check`` found errors, or
    ``verify`` or ``bench`` found differences. 2: the command line is invalid. 3: the file of ``inspect`` or
    ``operators`` has unsupported operators. 130: interrupted.
    """
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.command(arguments)
        sys.stdout.flush()
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has closed the pipe, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OnnxError, OSError, ImportError) as error:
        # JAX adds a note about the filtered traceback, which is not printed here.
        notes = (n for n in getattr(error, "__notes__", ()) if "JAX_TRACEBACK_FILTERING" not in n)
        print("\n".join([f"error: {_message(error)}", *notes]), file=sys.stderr)
        return 1
    return status


def _message(error: Exception) -> str:
    """The message of an error, without errno."""
    if isinstance(error, OnnxError) or not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"


def _parser() -> Parser:
    parser = Parser(
        prog="onnx2jax",
        description="Run, view, check, verify, time, train, join, simplify, export and write ONNX models as Python.",
        epilog="onnx2jax COMMAND --help has an example and the exit statuses",
    )
    parser.add_argument("--version", action="version", version=f"onnx2jax {__version__}, jax {jax.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser
