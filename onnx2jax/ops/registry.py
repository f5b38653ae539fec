"""The operator registry: registration by decorator, look-up by domain, name and opset.

A look-up imports the module that defines the operator (``index.py``), and reads the signature of its function then.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, Final, Literal, NamedTuple, TypedDict, TypeVar, Unpack

from ..proto.messages import normal_domain
from .arrays import in_float32
from .description import TRAITS, described
from .index import MODULES

Static = Annotated[Any, "static"]
"""Marks a parameter whose *value* must be known before compiling: a shape, axes, a count."""

StaticIfKnown = Annotated[Any, "static", "may be traced"]
"""Marks a Static parameter that may still arrive traced, where a caller's own jit or loop traces its source."""

Relative = Annotated[Any, "static", "relative"]
"""Marks a Static parameter that may arrive as ``TracedIntegers``, of which only differences or bounds are known."""

Shaped = Annotated[Any, "shaped"]
"""Marks a parameter of which only the shape, dtype or structure is read, never the value."""

MayBeEmpty = Annotated[Any, "may be empty"]
"""Marks an input that a node may omit although a required one follows."""


class Shards(NamedTuple):
    """How the weights of an operator are sharded.

    Attributes:
        parts: the number of shards; 1 if they are not sharded.
        along: the sharded axis: "experts", or the "in" or "out" features of a matrix product.
        spread: whether the model is placed on several devices, with this operator sharded or replicated.
    """

    parts: int = 1
    along: str = ""
    spread: bool = False


UNSHARDED: Final = Shards()

PADDED: Final = "onnx2jax.padded"
"""The domain of operators that pad their outputs to ``size``; the first output is the number of valid entries."""

# Opset 1 lists inputs that may be overwritten, and says of RNN, GRU and LSTM which outputs are read.
LEGACY_HINTS: Final = frozenset({"consumed_inputs", "output_sequence"})

F = TypeVar("F", bound=Callable[..., Any])


class Traits(TypedDict, total=False):
    """Properties of an operator, common to all its versions; one registration sets them for all.

    Attributes:
        heavy: worth compiling by itself: a convolution, a recurrence, a tree ensemble. Others run in NumPy where a
            model's shapes depend on data.
        product: a convolution or matrix product: heavy, and computed in ``convert(dtype=)`` and ``compute_dtype``.
        wide: operands and results stay float32 there: it needs float32's range (powers, exponentials, logarithms) or
            precision (long sums, norms, losses), or quantizes activations by their range, where rounding would flip
            8-bit codes. See ir/precision.py.
        exact: inputs that stay float32 there, and what they are computed from: angles, coordinates, scales, and what is
            compared, ranked, looked up or truncated, where a rounded 257 would be another position or id. So do inputs
            whose values decide shapes (``Static``) and what is cast to an integer or a string.
        broadcasts: its inputs broadcast against each other, so their shards must be on the same devices (rule DV-16).
        unsharded: ONNX defines no sharding of it (rule DV-18).
        labels: the attribute of integer class labels of a classifier; its first output are labels, and
            ``classlabels_strings`` stands for strings. See runtime/string_codes.py.
        strings: the attribute of strings that its first input is compared with. See runtime/string_codes.py.
        moves: it moves elements of its first inputs, whatever their type, and computes nothing.
        merges: "sums" or "products" if XLA merges its constants with those of a neighbour that says the same. See
            ir/patterns.py.
        extra: the extra of this package without which it raises, or a function of a node's attributes that gives it.
        limits: what is unsupported, and what is decided here because ONNX leaves it open; for docs/operators.md.
    """

    heavy: bool
    product: bool
    wide: bool
    exact: tuple[str, ...]
    broadcasts: bool
    unsharded: bool
    labels: str
    strings: str
    moves: bool
    merges: str
    extra: str | Callable[[Mapping[str, Any]], str]
    limits: str


@dataclass(frozen=True)
class Operator:
    """An implementation of an operator from opset ``since`` on, what its signature declares, and its Traits."""

    domain: str
    name: str
    since: int
    function: Callable[..., Any] | None
    inputs: tuple[str, ...] = ()
    variadic: str | None = None
    attributes: frozenset[str] = frozenset()
    static: frozenset[str] = frozenset()
    may_be_traced: frozenset[str] = frozenset()
    relative: frozenset[str] = frozenset()
    shaped: frozenset[str] = frozenset()
    may_be_empty: frozenset[str] = frozenset()
    fixtures: frozenset[str] = frozenset()
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, hash=False)
    """The values that an attribute annotated with ``Literal`` may take."""
    positive: frozenset[str] = frozenset()
    """Attributes whose numbers are positive."""
    for_siblings: Callable[..., Any] | None = None
    """Evaluates several nodes that read the same values: (*values, nodes=[attributes and fixtures]) -> their results.

    It is the attribute ``for_siblings`` of the function; None if the function has none."""
    instead: str = ""
    """The replacement, if the operator is deprecated from this opset on; it then has no function."""
    heavy: bool = False
    product: bool = False
    wide: bool = False
    exact: tuple[str, ...] = ()
    broadcasts: bool = False
    unsharded: bool = False
    labels: str = ""
    strings: str = ""
    moves: bool = False
    merges: str = ""
    extra: str | Callable[[Mapping[str, Any]], str] = ""
    limits: str = ""

    def __reduce__(self) -> Any:
        """Pickles the operator by name; the process that loads it must have registered it, too."""
        same = resolve(self.domain, self.name, self.since)
        if same is not None and (same.since, same.function) == (self.since, self.function):
            return _registered, (self.domain, self.name, self.since)
        return Operator, tuple(getattr(self, f.name) for f in fields(self))

    def parameter(self, position: int) -> str | None:
        """The name of the parameter that takes the input at ``position``."""
        return self.inputs[position] if position < len(self.inputs) else self.variadic

    def check_choices(self, attributes: Mapping[str, Any]) -> None:
        """Raise if an attribute is not in its ``Literal`` (NotImplementedError if that has one), or not positive."""
        for name, choices in self.choices.items():
            if name in attributes and attributes[name] not in choices:
                if len(choices) == 1:
                    raise NotImplementedError(f"{name} ({attributes[name]!r}) must be {choices[0]!r}: {self.limits}")
                raise ValueError(f"{name} ({attributes[name]!r}) must be one of {', '.join(map(repr, choices))}")
        for name in self.positive & attributes.keys():
            value = attributes[name]
            if not all(v > 0 for v in (value if isinstance(value, tuple | list) else (value,))):
                default = signature(self.function).parameters[name].default if self.function else Parameter.empty
                known = "" if default is Parameter.empty else f"; without the attribute it is {default or 'none'}"
                raise ValueError(f"{name} ({value}) must be positive{known}")


NO_OPERATOR: Final = Operator("", "", 0, None)
"""Stands for the operator of a node that calls a function: it declares nothing, and has no traits."""


@dataclass(frozen=True)
class Registration:
    """A version of an operator, whose signature is read when it is first looked up.

    Attributes:
        module: the module of this package that registered it; "" for a user's.
    """

    domain: str
    name: str
    since: int
    function: Callable[..., Any] | None
    traits: Traits
    instead: str = ""
    module: str = ""

    @property
    def operator(self) -> Operator:
        """The operator: the same object at each look-up, in all threads."""
        with _LOCK:
            if "_operator" not in vars(self):
                key, function = (self.domain, self.name, self.since), self.function
                declared: dict[str, Any] = {} if function is None else described(self.domain, function)
                if self.module:
                    _BUILT_IN[key] = function
                vars(self)["_operator"] = Operator(*key, function, **declared, instead=self.instead, **self.traits)
            return vars(self)["_operator"]


_LOCK: Final = threading.RLock()
_OPERATORS: dict[tuple[str, str], list[Registration]] = {}
"""The registered versions of each operator, the newest first."""
_BUILT_IN: dict[tuple[str, str, int], Callable[..., Any] | None] = {}


def op(
    name: str, *, domain: str = "", since: int = 1, half: Literal["itself", "float32"] = "itself",
    replace: bool = False, **traits: Unpack[Traits],
) -> Callable[[F], F]:  # fmt: skip
    """Register a function as the meaning of an ONNX operator.

    Positional parameters are the operator's inputs in order (``=None`` when optional, ``*xs`` when
    variadic), keyword-only parameters its attributes with the schema's defaults. A tuple returned is
    several outputs. Annotate an input with ``Static`` if its value must be known before compiling, an
    attribute with ``Literal["a", "b"]`` if other values must be rejected.

    Args:
        name: the operator's ``op_type``.
        domain: its domain; empty for ai.onnx.
        since: the first version of the operator set with this meaning of the operator.
        half: the type in which float16 and bfloat16 are computed; with "float32" results are rounded once, at the end.
            The returned function itself is unchanged.
        replace: allow a second registration of the same (domain, name, since).
        **traits: ``heavy=True``, ``limits="..."``: properties of all versions of the operator; see Traits.

    Raises:
        ValueError: the same (domain, name, since) is registered already.
        TypeError: there is no such trait.

    >>> @op("Twice", domain="com.example")
    ... def twice(x, *, times=2):
    ...     return x * times
    """

    def register(function: F) -> F:
        registered = in_float32(function) if half == "float32" else function
        registration = Registration(normal_domain(domain), name, since, registered, traits, module=module)
        if not module:
            _load(registration.domain, name)
            described(registration.domain, registered)  # a wrong annotation raises here, not in convert
        _add(registration, replace)
        return function

    if unknown := traits.keys() - Traits.__annotations__.keys():
        raise TypeError(f"op() has no trait {sorted(unknown)}; the traits are {list(Traits.__annotations__)}")

    module = _calling_module()  # a user's function may have any name and module
    return register


def taking(*inputs: str, **attributes: Any) -> Callable[[F], F]:
    """Declare the parameters behind a function's ``*inputs`` and ``**attributes``, with the attributes' defaults.

    The name of an optional input ends in "?". A required attribute has the default ``Parameter.empty``, a ``Literal``
    the first of its values.

    >>> @taking("A", "B?", axis=0)
    ... def f(*inputs, keepdims=1, **attributes): ...
    >>> str(signature(f))
    '(A, B=None, *, keepdims=1, axis=0)'
    """

    def declare(function: F) -> F:
        spelt = {Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL} if inputs else {Parameter.VAR_KEYWORD}
        parameters = [*signature(function).parameters.values()]
        parameters = [p for p in parameters if p.kind not in spelt and p.name not in attributes]
        for i, name in enumerate(inputs):
            default = None if all(n.endswith("?") for n in inputs[i:]) else Parameter.empty
            parameters.append(Parameter(name.rstrip("?"), Parameter.POSITIONAL_OR_KEYWORD, default=default))
        parameters += [Parameter(name, Parameter.KEYWORD_ONLY, default=value) for name, value in attributes.items()]

        @functools.wraps(function)
        def filled(*inputs: Any, **keywords: Any) -> Any:
            return function(*inputs, **defaults | keywords)

        empty = {n[:-1]: MayBeEmpty for n in inputs if n.endswith("?")}
        filled.__annotations__ = function.__annotations__ | empty | choices
        filled.__signature__ = Signature(sorted(parameters, key=lambda p: p.kind))  # type: ignore[attr-defined]
        return typing.cast(F, filled)

    choices = {name: value for name, value in attributes.items() if typing.get_origin(value) is Literal}
    attributes |= {name: typing.get_args(value)[0] for name, value in choices.items()}
    defaults = {name: value for name, value in attributes.items() if value is not Parameter.empty}
    return declare


def deprecated(name: str, *, domain: str = "", since: int, instead: str) -> None:
    """Register the operator as deprecated from opset ``since`` on; ``instead`` names its replacement."""
    _add(Registration(normal_domain(domain), name, since, None, {}, instead, _calling_module()), False)


def _calling_module() -> str:
    """The module of this package that is registering an operator, perhaps by a function of another; "" for a user's."""
    frame: Any = sys._getframe(2)
    prefix = f"{__package__}."
    while frame.f_code.co_name != "<module>" and frame.f_globals["__name__"].startswith(prefix):
        frame = frame.f_back
    name = frame.f_globals.get("__name__", "")
    return name.removeprefix(prefix) if name.startswith(prefix) else ""


def resolve(domain: str, name: str, opset: int = sys.maxsize) -> Operator | None:
    """The newest registration with ``since`` not above ``opset`` (default: the newest of all), or None."""
    domain = normal_domain(domain)
    _load(domain, name)
    for version in _OPERATORS.get((domain, name), ()):  # the newest first
        if version.since <= opset:
            return version.operator
    return None


def _load(domain: str, name: str) -> None:
    """Import the module that defines an operator; another thread that imports it is waited for."""
    if module := MODULES.get((domain, name)):
        import_module(f"{__package__}.{module}")


def load_all() -> None:
    """Import the modules of all operators."""
    for module in sorted({*MODULES.values()}):
        import_module(f"{__package__}.{module}")


def is_built_in(operator: Operator) -> bool:
    """Whether the operator is the package's own, compared by identity: a user's function may have any name and module.

    >>> is_built_in(resolve("", "Softmax"))
    True
    """
    missing = object()
    return _BUILT_IN.get((operator.domain, operator.name, operator.since), missing) is operator.function


def supported() -> dict[str, dict[str, tuple[int, ...]]]:
    """Domain -> operator -> the opsets at which its meaning changes. The domain ai.onnx is ``''``.

    >>> supported()[""]["Softmax"]
    (1, 13)
    """
    table: dict[str, dict[str, tuple[int, ...]]] = {}
    load_all()
    for (domain, name), versions in sorted(_OPERATORS.items()):
        table.setdefault(domain, {})[name] = tuple(sorted(v.since for v in versions))
    return table


def _registered(domain: str, name: str, since: int) -> Operator:
    operator = resolve(domain, name, since)
    if operator is None or operator.since != since:
        raise ValueError(
            f"the pickled model uses {domain or 'ai.onnx'}.{name} since opset {since}, which is not registered in this "
            "process: register it with onnx2jax.ops.op before loading the model"
        )
    return operator


def _add(registration: Registration, replace: bool) -> None:
    domain, name, since = registration.domain, registration.name, registration.since
    versions = _OPERATORS.get((domain, name), [])
    if not replace and any(v.since == since for v in versions):
        raise ValueError(
            f"{domain or 'ai.onnx'}.{name} since opset {since} is registered "
            f"already; to override it: op({name!r}, since={since}, replace=True)"
        )
    traits: Any = versions[0].traits if versions else TRAITS.get((domain, name), {})  # equal in all versions
    traits = traits | ({"heavy": True} if registration.traits.get("product") else {}) | registration.traits
    versions = sorted([v for v in versions if v.since != since] + [registration], key=lambda v: -v.since)
    _OPERATORS[domain, name] = [dataclasses.replace(v, traits=traits) for v in versions]
