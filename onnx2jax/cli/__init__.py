"""The command line: ``onnx2jax run model.onnx`` and other commands; only the called one is imported."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Final

import jax

from .. import __version__
from ..errors import OnnxError
from .parser import Arguments, CommandError, Parser
from .terminal import note, noted_warnings, with_files, with_flags

COMMANDS: Final = {
    "run": ("run", "run a model on files, images, texts or random numbers"),
    "inspect": ("inspect", "show inputs, outputs, parameters and operators, and which operators are unsupported"),
    "summary": ("inspect", "show each node's output shapes, parameters, FLOPs and bytes"),
    "check": ("verify", "list violations of the ONNX specification"),
    "verify": ("verify", "compare with onnxruntime, and report the first node that differs"),
    "bench": ("bench", "time a model's call, and onnxruntime's if it is installed"),
    "profile": ("bench", "show where the time of a call goes, by node and by operator"),
    "plan": ("plan", "estimate a model's cost on TPUs, GPUs or many devices: memory, FLOPs, bytes, collectives"),
    "train": ("train", "train a model by its training_info, or with a loss and an optax optimizer"),
    "generate": ("generate", "generate text with a decoder"),
    "export": ("write", "write a program that runs with jax only"),
    "join": ("write", "join two models: outputs of the first become inputs of the second"),
    "simplify": ("write", "fold constants and BatchNormalization into weights and remove no-ops, in a file of its own"),
    "source": ("write", "write the model as a Python module over jax.numpy, and its weights beside it"),
    "view": ("inspect", "open the graph as an interactive page in the browser"),
    "draw": ("inspect", "write the graph, branches and bodies included, as an interactive HTML page, or as a picture"),
    "operators": ("inspect", "list the supported operators, or those of a file"),
    "cache": ("demo", "show the folder of compiled programs, or clear it"),
    "demo": ("demo", "classify sixteen digits with the bundled model, and differentiate it"),
}
"""Command -> a module, and the command's help; in the order of the help.

The module's ``add_COMMAND`` adds the options to the parser; ``do_COMMAND`` executes the command with the arguments and
returns the exit status, where None is success.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0: success. 1: the model or the data is invalid (the reason is on standard error), ``check`` found errors, or
    ``verify`` or ``bench`` found differences. 2: the command line is invalid. 3: the file of ``inspect`` or
    ``operators`` has unsupported operators. 130: interrupted.
    """
    argv = sys.argv[1:] if argv is None else argv
    sys.stdout, sys.stderr = (s or io.StringIO() for s in (sys.stdout, sys.stderr))  # None if it is closed
    try:
        arguments = _parser(argv).parse_args(argv, Arguments(argv=argv))
        with noted_warnings(arguments.parser._option_string_actions):
            status: int = arguments.command(arguments) or 0
        sys.stdout.flush()
    except CommandError as error:
        note(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has closed the pipe, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OnnxError, OSError, ImportError) as error:
        # JAX adds a note about the filtered traceback, which is not printed here.
        notes = [n for n in getattr(error, "__notes__", ()) if "JAX_TRACEBACK_FILTERING" not in n]
        options = arguments.parser._option_string_actions
        message = with_files(f"error: {_message(error)}", vars(arguments).get("input", ()))
        note("\n".join(with_flags(text, options) for text in (message, *notes)))
        return 1
    return status


def _message(error: Exception) -> str:
    """The message of an error, without errno."""
    if isinstance(error, OnnxError) or not isinstance(error, OSError) or not error.strerror:
        return str(error)
    slashes = r"^([a-z][\w+.-]+:)/(?!/)"  # of a URL, which a Path merges
    filename = re.sub(slashes, lambda url: f"{url[1]}//" if url[1] != "file:" else "file:///", str(error.filename))
    return error.strerror if error.filename is None else f"{filename}: {error.strerror}"


def _parser(names: Iterable[str] = tuple(COMMANDS)) -> Parser:
    """The parser of all commands; those among the names have their options."""
    parser = Parser(
        prog="onnx2jax",
        description="Run, view, check, verify, time, train, join, simplify, export and write ONNX models as Python.",
        epilog="onnx2jax COMMAND --help has an example and the exit statuses",
    )
    parser.add_argument("--version", action="version", version=f"onnx2jax {__version__}, jax {jax.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (module, help) in COMMANDS.items():
        command = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")
        if name in names:
            functions = vars(import_module(f"{__name__}.{module}"))
            functions[f"add_{name}"](command)
            command.set_defaults(command=functions[f"do_{name}"], parser=command)
    return parser
