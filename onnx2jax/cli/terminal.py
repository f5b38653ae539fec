"""Shared by commands: help, tables, progress, parsing of dimensions, and errors of the command line."""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any, Final

import numpy as np

from ..errors import did_you_mean
from ..model.changes.dtype import DTYPES
from ..model.convert import convert
from ..model.model import Model
from ..model.reports.table import table
from ..progress import stage
from ..proto.paths import path_of
from ..proto.types import TensorType

STATUSES: Final = {0: "success", 1: "the model or the data is invalid", 2: "the command line is invalid"}
"""Exit statuses of every command."""


class Parser(argparse.ArgumentParser):
    """A parser that suggests commands and options, and reports unknown options with the usage of their command."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser = getattr(found, "parser", self)
            flags = [text.partition("=")[0] for text in unknown if text.startswith("-")]
            near = did_you_mean(flags, parser._option_string_actions)
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
        return found

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = did_you_mean(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}{near}") from None


class CommandError(Exception):
    """The command line is invalid in a way that argparse does not detect."""


def add_command(
    parser: argparse.ArgumentParser,
    function: Callable[[argparse.Namespace], int],
    *,
    example: str,
    statuses: dict[int, str] | None = None,
    json: str = "print everything as JSON",
    model: str | None = "",
) -> None:
    """Add what every command has: the function that it runs, the end of its help, ``--json``, the model.

    Args:
        parser: the command's.
        function: executes the command and returns the exit status.
        statuses: added to STATUSES, or replacing some.
        json: the help of ``--json``.
        model: the help of the model's file, beside which there are the options that ``reading`` reads; None for a
            command without one.
    """
    table = "\n".join(f"  {status}  {what}" for status, what in {**STATUSES, **(statuses or {})}.items())
    parser.epilog = f"example:\n  onnx2jax {example}\n\nexit status:\n{table}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(command=function, parser=parser)
    parser.add_argument("--json", action="store_true", help=json)
    if model is not None:
        parser.add_argument("model", type=as_path, help=model)
        parser.add_argument("--external-data-dir", type=as_path, metavar="DIR", help="the folder of external data")
        parser.add_argument("--follow-links", action="store_true", help="accept external data behind links")


def reading(arguments: argparse.Namespace) -> Any:
    """The keywords of ``read`` that ``add_command`` added."""
    return {"external_data_dir": arguments.external_data_dir, "follow_links": arguments.follow_links}


def as_path(text: str) -> Path:
    """Parse a path, for argparse; to pathlib, an empty one is the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return path_of(text)


def as_npz(text: str) -> Path:
    """Parse the path of an .npz file to be written, for argparse."""
    if Path(text).suffix not in ("", ".npz"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is written as an .npz file: name it {Path(text).with_suffix('.npz')}"
        )
    return as_path(text)


def whole(text: str) -> int:
    """Parse a non-negative integer, for argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def add_dims(parser: argparse.ArgumentParser, help: str = "the extent of a dimension variable (default: 1)") -> None:
    """Add ``--dim NAME=SIZE``, which ``dims`` reads."""
    parser.add_argument("--dim", action="append", default=[], metavar="NAME=SIZE", help=f"{help}; repeatable")


def add_dtype(parser: Any) -> None:
    """Add ``--dtype``, which ``convert`` takes."""
    parser.add_argument("--dtype", choices=DTYPES, help="compute the model in it (default: the file's types)")


def add_computing(parser: Any) -> None:
    """Add ``--dtype`` and ``--scan-layers``, which ``computing`` reads."""
    add_dtype(parser)
    parser.add_argument(
        "--scan-layers",
        action="store_true",
        default=None,
        help="evaluate repeated layers as one loop, which compiles sooner",
    )


def add_rebatch(parser: Any) -> None:
    """Add ``--rebatch`` and ``--batch-axis``, which ``computing`` reads."""
    parser.add_argument(
        "--rebatch",
        action="store_true",
        help="accept multiples of the batch that the file fixes, its inputs' first axis",
    )
    parser.add_argument(
        "--batch-axis",
        action="append",
        default=[],
        metavar="NAME=AXIS",
        help="the same, where the batch is another axis of an input or output, or not in all inputs; repeatable",
    )


def computing(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of ``convert`` that ``add_dtype``, ``add_computing`` and ``add_rebatch`` added."""
    found = {n: vars(arguments)[n] for n in ("dtype", "scan_layers", "rebatch") if n in arguments}
    axes = {
        n: _size("--batch-axis", n, text)
        for n, text in pairs("--batch-axis", vars(arguments).get("batch_axis", ()), "AXIS")
    }
    return found | ({"rebatch": axes} if axes else {})


def converted(arguments: argparse.Namespace, **options: Any) -> Model:
    """The model, converted by the options of the command line and others."""
    with loading(arguments.model):
        return convert(arguments.model, **reading(arguments), **computing(arguments), **options)


def dims(options: Iterable[str]) -> dict[str, int]:
    """The extents of ``NAME=SIZE`` options.

    Raises:
        CommandError: an option has another form.
    """
    return {name: _size("--dim", name, text) for name, text in pairs("--dim", options, "SIZE")}


def extents(options: Iterable[str]) -> dict[str, int | str]:
    """Like ``dims``, but SIZE may be an expression of other dimensions: ``total=past+sequence``."""
    found = pairs("--dim", options, "SIZE")
    return {name: int(text) if text.isdecimal() else text for name, text in found}


def _size(option: str, name: str, text: str) -> int:
    if not text.isdecimal():
        raise CommandError(f"{option} {name}={text}: {text!r} is not a whole number")
    return int(text)


def pairs(option: str, values: Iterable[str], what: str, *, first: bool = False) -> Iterator[tuple[str, str]]:
    """The names and values of ``NAME=...`` options, split at the last ``=``, or at the first.

    Raises:
        CommandError: an option has another form.
    """
    for text in values:
        name, equals, value = text.partition("=") if first else text.rpartition("=")
        if not (name and equals and value):
            raise CommandError(f"{option} {text}: expected NAME={what}")
        yield name, value


def print_table(title: str, headers: Sequence[str], rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table: with rich on a terminal, if installed; elsewhere plain columns, one line per row."""
    rows = list(rows)
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.markup import escape
            from rich.table import Column, Table
        except ImportError:
            pass
        else:
            grid = Table(*(Column(h, overflow="fold") for h in headers), header_style="bold")
            for row in rows:
                grid.add_row(*map(escape, row))
            console = Console()
            console.print(escape(title), style="italic")
            console.print(grid)
            return
    print(f"\n{title}")
    print(indent(table([headers, *rows], width=sys.maxsize), "  "))


def print_json(facts: Any) -> None:
    print(json.dumps(facts, indent=2))


def print_result(arguments: argparse.Namespace, facts: Any, text: str) -> int:
    """Print a command's result: the facts with ``--json``, else the text; returns the exit status of success."""
    print(json.dumps(facts, indent=2) if arguments.json else text)
    return 0


def loading(model: Path) -> Any:
    """The progress of reading a model."""
    return stage(f"loading {model.name}")


_FLAGS: Final = {
    r"verify\(against='(\w+)'\)": r"--against \1",
    r"convert\(\.\.\., external_data_dir='folder'\)": "--external-data-dir FOLDER",
    r"export\((?:\.\.\., )?platforms=\['?(.*?)'?\]\)": r"--platforms \1",
    r"export\(\.\.\., weights='inside'\)": "--weights inside",
    r"format='jax' keeps": "--format jax keeps",
    r"convert\(\.\.\., dtype='(\w+)'\)": r"--dtype \1",
    r"convert\(\.\.\., static=\{'(\w+)': value\}\)": r"--static \1=VALUE",
    r"convert\(\.\.\., rebatch=True\)": "--rebatch",
    r"convert\(\.\.\., rebatch=\{'input name': axis\}\)": "--batch-axis NAME=AXIS",
    r"convert\(\.\.\., rebatch=\{'input': axis, ('.*?'): axis\}\)": r"--batch-axis INPUT=AXIS --batch-axis \1=AXIS",
    r"convert\(\.\.\., rebatch=\{('.*?'): axis, \.\.\.\}\)": r"--batch-axis \1=AXIS",
    r"to_source\(folder, overwrite=True\)": "--overwrite",
    r"convert\(\.\.\., follow_links=True\)": "--follow-links",
    r"convert\(('.*?')\)": r"pass \1",
    r"onnx2jax\.decoder\(('.*?')\) to generate text": r"\1 to onnx2jax generate",
    r"read it first: open\(('.*?'), 'rb'\)\.read\(\)": r"copy it first: cat \1 > model.onnx",
    r", or pass (gzip|bz2|lzma|zipfile)\..*": "",
    r"temperature 0 takes": "--temperature 0 takes",
}
"""Advice in Python, as a pattern -> the same as flags."""


def with_flags(message: str, options: Container[str] | None = None) -> str:
    """A message whose advice in Python is given as flags, where a command has them among its options.

    >>> with_flags("Try model.summary(dims={'batch': 64}), or verify(against='reference')")
    'Try --dim batch=64, or --against reference'
    >>> with_flags("export(..., format='stablehlo', dims={'n': 1, 'm': 1}) or export(..., platforms=['tpu'])")
    '--dim n=1 --dim m=1 or --platforms tpu'
    >>> with_flags("fix it: convert(..., static={'s': value})", ["--dim"])
    "fix it: convert(..., static={'s': value})"
    >>> with_flags("for other batch sizes: convert(..., rebatch=True)", ["--dim"])
    'for other batch sizes: onnx2jax run ... --rebatch'
    >>> with_flags("a folder: convert('a/model.onnx'), or onnx2jax.decoder('a') to generate text")
    "a folder: pass 'a/model.onnx', or 'a' to onnx2jax generate"
    """

    def sizes(advice: re.Match[str]) -> str:
        return " ".join(f"--dim {name}={size}" for name, size in ast.literal_eval(advice[1]).items())

    message = re.sub(r"(?:model\.summary|export)\((?:\.\.\., format='stablehlo', )?dims=(\{.*?\})\)", sizes, message)
    for python, flags in _FLAGS.items():
        if options is None or not flags.startswith("--") or flags.split()[0] in options:
            message = re.sub(python, flags, message)
        elif flags.startswith(("--rebatch", "--batch-axis")):
            message = re.sub(python, f"onnx2jax run ... {flags}", message)
    return message


def with_files(message: str, files: Iterable[str]) -> str:
    """A message whose advice to convert an input is a command that converts its file, one of ``--input``.

    >>> with_files("Convert it: x.astype('float32')", ["x=a.npy"])[:24]
    'Convert it: python -c "i'
    """

    def command(advice: re.Match[str]) -> str:
        name, dtype = advice.groups()
        for path in (f.removeprefix(f"{name}=") for f in files if f.startswith(f"{name}=") or f.endswith(".npz")):
            old = f"np.load({path!r})"
            new = f"{old}.astype({dtype!r})"
            if path.endswith(".npz"):
                new = f"**{{**{old}, {name!r}: {old}[{name!r}].astype({dtype!r})}}"
            save = "savez" if path.endswith(".npz") else "save"
            return f'Convert it: python -c "import ml_dtypes, numpy as np; np.{save}({path!r}, {new})"'
        return advice[0]

    return re.sub(r"Convert it: (.+?)\.astype\('(\w+)'\)", command, message)


def note(text: str) -> None:
    """Print a remark on standard error."""
    print(text, file=sys.stderr)


def type_of(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return str(TensorType(value.dtype, value.shape))
    return f"{type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else type(value).__name__
