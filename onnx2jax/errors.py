"""Exceptions of onnx2jax. Each derives from OnnxError and from the built-in that a caller would expect."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, ParamSpec, TypeVar

__all__ = [
    "BucketError",
    "CacheError",
    "CheckpointError",
    "ExternalDataError",
    "ExternalDataNotFoundError",
    "InputError",
    "InputNameError",
    "InputShapeError",
    "InputTypeError",
    "InputValueError",
    "KnownValueError",
    "LossError",
    "ModelError",
    "OnnxError",
    "OperatorError",
    "ProcessError",
    "RandomKeyError",
    "RebatchError",
    "ShardingError",
    "TrainingFormError",
    "UnsupportedError",
    "UnsupportedOperatorError",
]

P = ParamSpec("P")
R = TypeVar("R")


def with_rules(text: str, *rules: str) -> str:
    """The message, followed by the rules of the format that it is about.

    >>> with_rules("the graph has no name", "MV-04")
    'the graph has no name (rule MV-04)'
    """
    return f"{text} (rule{'s' * (len(rules) > 1)} {', '.join(rules)})" if rules else text


@contextmanager
def inside(node: str, *deciding: str) -> Iterator[None]:
    """Name a node in the notes of an exception that its body raises: for modules that ``to_source`` writes.

    ``deciding``: inputs of the model that decide a condition of which JAX traces both branches.

    >>> with inside("node 'y' (If, opset 22)"):
    ...     1 / 0
    Traceback (most recent call last):
    ZeroDivisionError: division by zero
    inside node 'y' (If, opset 22)
    """
    try:
        yield
    except Exception as e:
        e.add_note(f"inside {node}")
        if deciding:
            static = ", ".join(f"{n!r}: value" for n in deciding)
            e.add_note(
                "JAX traces both branches, and one of them may not support these shapes. To write the source with one: "
                f"convert(..., static={{{static}}}).to_source(folder)"
            )
        raise


def did_you_mean(names: str | Iterable[str], valid: Iterable[str], cutoff: float = 0.6) -> str:
    """The valid names closest to a name or several, as the end of a message; empty where none is close.

    ``cutoff``: the least similarity, as for ``difflib.get_close_matches``.

    >>> did_you_mean("imge", ["image", "mask"])
    "; did you mean 'image'?"
    >>> did_you_mean(["qqq"], ["image", "mask"])
    ''
    """
    names, by_lower = names_list(names), {name.lower(): name for name in valid}
    matches = [difflib.get_close_matches(name.lower(), by_lower, 1, cutoff) for name in names]
    closest = dict.fromkeys(by_lower[match] for match in chain(*matches))
    return f"; did you mean {', '.join(map(repr, closest))}?" if closest else ""


def nearest(pattern: str, valid: Iterable[str]) -> list[str]:
    """The three valid names most like a name or pattern that matches none; the first three where none is like it.

    >>> nearest("layers.*.weight", ["layer.0.weight", "bias"])
    ['layer.0.weight']
    >>> nearest("qqq", ["layer.0.weight", "bias"])
    ['layer.0.weight', 'bias']
    """
    names = list(valid)
    return difflib.get_close_matches(pattern, names, 3, 0.3) or names[:3]


def unknown_keywords(unknown: Iterable[str], valid: Iterable[str]) -> str:
    """A message about keywords that a function does not take, with those of its own that are meant, or nearest.

    >>> unknown_keywords(["strickt"], ["strict", "dims"])
    "unknown keyword strickt; did you mean 'strict'?"
    >>> unknown_keywords(["dim_overrides"], ["strict", "dims"])
    "unknown keyword dim_overrides; the nearest are 'dims'"
    """
    unknown, valid = list(unknown), list(valid)
    similar = list(dict.fromkeys(match for name in unknown for match in nearest(name, valid)))[:3]
    hint = did_you_mean(unknown, valid) or f"; the nearest are {', '.join(map(repr, similar))}"
    return f"unknown keyword {', '.join(unknown)}{hint}"


def known_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """The function with misspelt keywords refused by InputNameError, which names the closest valid ones."""
    parameters = inspect.signature(function).parameters.values()
    valid = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name != "self"]

    @functools.wraps(function)
    def checked(*args: P.args, **keywords: P.kwargs) -> R:
        if unknown := [name for name in keywords if name not in valid]:
            is_class = function.__name__ == "__init__"
            name = function.__qualname__.removesuffix(".__init__") if is_class else function.__name__
            raise InputNameError(f"{name}: {_as_options(name, args, unknown) or unknown_keywords(unknown, valid)}")
        return function(*args, **keywords)

    return checked


def _as_options(method: str, args: tuple[Any, ...], unknown: list[str]) -> str:
    """A message about unknown keywords of a model's method that ``convert`` takes; empty if it does not take all."""
    options = getattr(args[0], "options", None) if args else None
    if not all(n in getattr(options, "__dataclass_fields__", ()) for n in unknown):
        return ""
    keywords = ", ".join(f"{n}=..." for n in unknown)
    return f"unknown keyword {', '.join(unknown)}, one of convert: model.with_options({keywords}).{method}(...)"


def names_list(names: str | Iterable[str]) -> list[str]:
    """Names as a list; a single string is one name, not its characters.

    >>> names_list("logits"), names_list(("a", "b"))
    (['logits'], ['a', 'b'])
    """
    return [names] if isinstance(names, str) else list(names)


class OnnxError(Exception):
    """Base of every error that onnx2jax raises on purpose.

    Attributes:
        message: what is wrong, where, and how to fix it.
        rules: the rules of the format that are violated, listed in docs/conformance.md; ``str(error)`` ends with them.
    """

    def __init__(self, message: str = "", *, rule: str | tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.rules: tuple[str, ...] = (rule,) if isinstance(rule, str) else rule

    def __str__(self) -> str:
        return with_rules(self.message, *self.rules)


class ModelError(OnnxError, ValueError):
    """The file is not an ONNX model, or violates a rule of the format."""


class ExternalDataError(ModelError):
    """A tensor's external data is out of the file's bounds, or in a file that may not be read."""


class ExternalDataNotFoundError(ExternalDataError, FileNotFoundError):
    """A file of external data does not exist."""


class UnsupportedError(OnnxError, NotImplementedError):
    """The model is valid, but uses something that is not implemented."""


class UnsupportedOperatorError(UnsupportedError):
    """The model uses unsupported operators; the message lists all of them."""


class InputError(OnnxError):
    """A call does not fit the model's declared inputs."""


class InputNameError(InputError, TypeError):
    """An input is missing, unknown, or given twice."""


class InputTypeError(InputError, TypeError):
    """An input's element type differs from the declared one."""


class InputShapeError(InputError, ValueError):
    """An input's rank or extent differs from the declared one, or two inputs disagree about a dimension variable."""


class InputValueError(InputError, ValueError):
    """An argument has an invalid value, such as a token outside the vocabulary."""


class OperatorError(OnnxError, ValueError):
    """An operator rejects its inputs or attributes; the message names the node, opset, shapes and dtypes."""


class KnownValueError(OnnxError, TypeError):
    """A value that must be known before compiling is traced.

    Operators raise it with a message alone; the interpreter adds where. The runtime catches it where known values would
    help: it unrolls an enclosing Loop, or runs the node on the host.

    Attributes:
        values: names of the graph's values of which one must be known.
        node: the node that needs the value.
    """

    def __init__(self, message: str = "", values: tuple[str, ...] = (), node: Any = None) -> None:
        super().__init__(message)
        self.values: tuple[str, ...] = values
        self.node: Any = node


class CheckpointError(OnnxError, ValueError):
    """A checkpoint is damaged, or does not match the state it is loaded into."""


class RandomKeyError(OnnxError, TypeError):
    """The model draws random numbers, but no PRNG key was given."""


class BucketError(OnnxError, ValueError):
    """Padding to a bucket changes an output of the model."""


class CacheError(OnnxError, ValueError):
    """A decoder's logits with a fixed-length KV cache differ from those with a growing one."""


class RebatchError(OnnxError, ValueError):
    """A model's batch size cannot be changed, or not provably."""


class ShardingError(OnnxError, ValueError):
    """A sharding does not fit the mesh or an array, or a device configuration does not fit the model."""


class ProcessError(OnnxError, RuntimeError):
    """The processes of a multi-process program diverged: files or arrays differ, or a process stopped."""


class LossError(OnnxError, TypeError):
    """A loss is not a floating-point scalar."""


class TrainingFormError(OnnxError, ValueError):
    """A model cannot be trained as requested: no trainable parameters, or nodes without a training form."""


class DeclarationWarning(UserWarning):
    """An output has another element type, rank or fixed extent than the model declares (rule GR-18)."""


class RecompilationWarning(UserWarning):
    """A program is compiled again and again, because its inputs come in ever new shapes or values."""


class ZeroGradientWarning(UserWarning):
    """Trained weights get zero gradients, because every path to the outputs passes a rounding node."""


class NaNLossWarning(UserWarning):
    """A training step has a loss that is NaN, and its parameters may be NaN from there on."""


class AdapterWarning(UserWarning):
    """Adapters for all linear maps leave out many of a network's weights, which are of other layers."""


class OptimizationWarning(UserWarning):
    """A pass over a program failed, and the program runs without it: right, but perhaps slower."""


class DeviationWarning(UserWarning):
    """The result follows ONNX, and other implementations, which may have produced the model, differ."""


class MissingExtraWarning(UserWarning):
    """Some nodes need a package that is not installed: a call that reaches them raises."""


class ShardingWarning(UserWarning):
    """Part of a requested placement was not applied; results are the same."""
