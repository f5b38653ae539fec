"""The parser of commands: options that several of them have, types of arguments, and the model that they load."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from ..errors import did_you_mean
from ..model.changes.dtype import DTYPES
from ..model.convert import convert
from ..model.model import Model
from ..progress import stage
from ..proto.files import path_of

STATUSES: Final = {0: "success", 1: "the model or the data is invalid", 2: "the command line is invalid"}
"""Exit statuses of every command."""


class CommandError(Exception):
    """The command line is invalid in a way that argparse does not detect."""


class Arguments(argparse.Namespace):
    """A command line: what every command has, and its options by name.

    Attributes:
        argv: the words.
        parser: the command's.
        json: whether to print JSON.
        model: the model's file, of commands with one.
    """

    argv: Sequence[str]
    parser: Parser
    json: bool
    model: Path


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


def number(text: str) -> float:
    """Parse a finite number of at least 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


class Parser(argparse.ArgumentParser):
    """A parser that suggests commands and options, and reports unknown options with the usage of their command."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        arguments, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser = getattr(arguments, "parser", self)
            flags = [text.partition("=")[0] for text in unknown if text.startswith("-")]
            near = did_you_mean(flags, parser._option_string_actions)
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
        return arguments

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = did_you_mean(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}{near}") from None

    def describe(
        self,
        example: str,
        *,
        statuses: dict[int, str] | None = None,
        json: str = "print everything as JSON",
        model: str | None = "",
    ) -> None:
        """Add what every command has: the end of its help, ``--json``, the model.

        Args:
            example: a command line.
            statuses: added to STATUSES, or replacing some.
            json: the help of ``--json``.
            model: the help of the model's file, beside which there are the options that ``reading`` reads; None for a
                command without one.
        """
        table = "\n".join(f"  {status}  {what}" for status, what in {**STATUSES, **(statuses or {})}.items())
        self.epilog = f"example:\n  onnx2jax {example}\n\nexit status:\n{table}"
        self.formatter_class = argparse.RawDescriptionHelpFormatter
        self.add_switch("--json", json)
        if model is not None:
            self.add_argument("model", type=as_path, help=model)
            self.add_reading()

    def add_reading(self) -> None:
        """Add the options that ``reading`` reads."""
        self.add_argument("--external-data-dir", type=as_path, metavar="DIR", help="the folder of external data")
        self.add_switch("--follow-links", "accept external data behind links")
        self.add_switch("--allow-newer-opset", "run an opset newer than the newest supported one as that one")

    def add_switch(self, flag: str, help: str) -> None:
        """Add an option without a value, False by default."""
        self.add_argument(flag, action="store_true", help=help)

    def add_repeatable(self, flag: str, metavar: str, help: str, parse: Callable[[str], Any] = str) -> None:
        """Add an option whose values are listed."""
        self.add_argument(flag, action="append", default=[], type=parse, metavar=metavar, help=f"{help}; repeatable")

    def add_pairs(
        self, flag: str, form: str, help: str, parse: Callable[[str], Any] = str, *, first: bool = False
    ) -> None:
        """Add a repeatable option whose values ``pair`` reads."""
        self.add_repeatable(flag, form, help, lambda text: pair(flag, form, text, parse, first=first))

    def add_dims(
        self, help: str = "the extent of a dimension variable (default: 1)", parse: Callable[[str], int | str] = whole
    ) -> None:
        """Add ``--dim NAME=SIZE``."""
        self.add_pairs("--dim", "NAME=SIZE", help, parse)

    def add_dtype(self, group: Any = None) -> None:
        """Add ``--dtype``, which ``computing`` reads, to the parser or a group of its options."""
        (group or self).add_argument(
            "--dtype", choices=DTYPES, help="compute the model in it (default: the file's types)"
        )

    def add_computing(self, group: Any = None) -> None:
        """Add ``--dtype`` and ``--scan-layers``, which ``computing`` reads."""
        self.add_dtype(group)
        (group or self).add_argument(
            "--scan-layers",
            action="store_true",
            default=None,
            help="evaluate repeated layers as one loop, which compiles sooner",
        )

    def add_rebatch(self) -> None:
        """Add ``--rebatch`` and ``--batch-axis``, which ``computing`` reads."""
        self.add_switch("--rebatch", "accept multiples of the batch that the file fixes, its inputs' first axis")
        self.add_pairs(
            "--batch-axis",
            "NAME=AXIS",
            "the same, where the batch is another axis of an input or output, or not in all inputs",
            whole,
        )


def pair(flag: str, form: str, text: str, parse: Callable[[str], Any] = str, *, first: bool = False) -> tuple[str, Any]:
    """The name and the value of an option's ``NAME=VALUE``, split at the last ``=``, or at the first.

    Raises:
        CommandError: the text has another form, or ``parse`` raises ArgumentTypeError.
    """
    name, equals, value = text.partition("=") if first else text.rpartition("=")
    if not (name and equals and value):
        raise CommandError(f"{flag} {text}: expected {form}")
    try:
        return name, parse(value)
    except argparse.ArgumentTypeError as error:
        raise CommandError(f"{flag} {text}: {error}") from None


def reading(arguments: Arguments) -> Any:
    """The keywords of ``read`` that ``add_reading`` added."""
    return _options(arguments, "external_data_dir", "follow_links", "allow_newer_opset")


def computing(arguments: Arguments) -> dict[str, Any]:
    """The options of ``convert`` that ``add_dtype``, ``add_computing`` and ``add_rebatch`` added."""
    axes = dict(vars(arguments).get("batch_axis", ()))
    return _options(arguments, "dtype", "scan_layers", "rebatch") | ({"rebatch": axes} if axes else {})


def _options(arguments: Arguments, *names: str) -> dict[str, Any]:
    """Those of the options that the command has."""
    return {n: vars(arguments)[n] for n in names if n in arguments}


def loading(model: Path) -> Any:
    """The progress of reading a model."""
    return stage(f"loading {model.name}")


def converted(arguments: Arguments, **options: Any) -> Model:
    """The model, converted by the options of the command line and others."""
    with loading(arguments.model):
        return convert(
            arguments.model, **{"dims": dict(arguments.dim), **reading(arguments), **computing(arguments), **options}
        )
