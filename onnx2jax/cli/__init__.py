"""At a terminal: ``onnx2jax run model.onnx`` and others; each command has a module of its own here."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import jax

from .. import __version__
from ..errors import OnnxError
from . import (
    bench,
    check,
    demo,
    draw,
    export,
    generate,
    inspect,
    join,
    operators,
    plan,
    profile,
    run,
    simplify,
    summary,
    train,
    verify,
)
from .terminal import CommandError

COMMANDS = (
    run,
    inspect,
    summary,
    check,
    verify,
    bench,
    profile,
    plan,
    train,
    generate,
    export,
    join,
    simplify,
    draw,
    operators,
    demo,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0: done. 1: the model or the data is at fault, and standard error says how. 2: the command line is.
    1 also: ``check`` found errors, ``verify`` and ``bench`` differences. 3: the file of ``inspect`` or
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
    except BrokenPipeError:  # who reads has seen enough, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OnnxError, OSError, ImportError) as error:
        # JAX adds that it has shortened the traceback, which nobody sees here.
        notes = (n for n in getattr(error, "__notes__", ()) if "JAX_TRACEBACK_FILTERING" not in n)
        print("\n".join([f"error: {_said(error)}", *notes]), file=sys.stderr)
        return 1
    return status


def _said(error: Exception) -> str:
    """What an error says, without the number that the operating system gives it."""
    if isinstance(error, OnnxError) or not isinstance(error, OSError) or not error.strerror:
        return str(error)
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="onnx2jax",
        description="Run, inspect, check, verify, time, train, join, simplify and export ONNX models; generate text.",
        epilog="onnx2jax COMMAND --help has an example and the exit statuses",
    )
    parser.add_argument("--version", action="version", version=f"onnx2jax {__version__}, jax {jax.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser
