"""The passes between trace and XLA, in order: each rewrites a program into one that computes the same.

A pass that fails unexpectedly warns once in a process, with its name, and the program stays as it was before. Each is
imported when it first runs. It says what it gains, in processor time of one core of an AMD EPYC (Zen 4) with jax 0.10;
programs before and after are in its module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import jax
import numpy as np

from .. import compat, debug
from ..errors import InputTypeError, InputValueError, OptimizationWarning
from .program import Program, as_function, is_convolution

if TYPE_CHECKING:
    from .passes.any.hoist_params import SplitProgram


@dataclass(frozen=True)
class Passes:
    """Which passes run; hashable, as part of what selects a compiled program.

    Attributes:
        platform: "cpu", or another of JAX's: there only passes for all platforms run.
        skip: names of passes that do not run.
        portable: whether other processes load what is compiled, which cannot call oneDNN.
    """

    platform: str = "cpu"
    skip: frozenset[str] = frozenset()
    portable: bool = False

    @property
    def onednn(self) -> bool:
        """Whether programs may call oneDNN."""
        if self.platform != "cpu" or "onednn" in self.skip or self.portable:
            return False
        from .passes.cpu.onednn import is_available

        return is_available()

    def skipping(self, *names: str) -> Passes:
        """The same without these passes."""
        return replace(self, skip=self.skip | {*names})


def skipped(optimize: Any) -> frozenset[str]:
    """The passes that ``convert(optimize={"skip": [...]})`` names.

    Raises:
        InputTypeError: it has another form.
        InputValueError: a name is that of no pass.
    """
    skip = optimize.get("skip") if isinstance(optimize, Mapping) and optimize.keys() == {"skip"} else None
    if not isinstance(skip, Sequence | set | frozenset) or isinstance(skip, str):
        raise InputTypeError(f"optimize is {optimize!r:.80}: pass True, False, or {{'skip': [{NAMES[0]!r}]}}")
    if unknown := [name for name in skip if name not in NAMES]:
        raise InputValueError(
            f"optimize={optimize!r:.80}: no pass is called {unknown[0]!r}; passes: {', '.join(NAMES)}"
        )
    return frozenset(skip)


class Pass(NamedTuple):
    """A pass over programs.

    Attributes:
        name: for ``Passes.skip``.
        rewrite: the program after it; the same object where it finds nothing to rewrite.
        applies: its precondition.
        platforms: where it runs; None for everywhere.
    """

    name: str
    rewrite: Callable[[Program, Passes], Program]
    applies: Callable[[Program, Passes], bool] = lambda _program, _options: True
    platforms: tuple[str, ...] | None = ("cpu",)


def _has_convolution(program: Program, _options: Passes) -> bool:
    return program.has("conv_general_dilated")


def _has_bytes(program: Program, _options: Passes) -> bool:
    return any(v.aval.dtype in (np.int8, np.uint8) for v in (*program.inputs, *program.constants))


def _calls_onednn(program: Program, options: Passes) -> bool:
    """Whether there is work for oneDNN, and then whether it may be called: to find that out takes 40 ms."""
    from .passes.cpu.onednn import multiplies_bytes

    return multiplies_bytes(program) and options.onednn


def _imported(module: str, name: str, *arguments: Callable[[Passes], Any]) -> Callable[[Program, Passes], Program]:
    """A function of a module of ``passes``, imported when it first runs; its further arguments follow from options."""

    def rewrite(program: Program, options: Passes) -> Program:
        function = getattr(import_module(f"{__package__}.passes.{module}"), name)
        return function(program, *(argument(options) for argument in arguments))

    return rewrite


PASSES: Final = (
    # Computes products of dequantised integers in integers. ResNet-18 in int8 (QDQ): 0.45 with VNNI, 0.95 without.
    Pass("dequantize", _imported("any.dequantize", "multiply_integers"), _has_bytes, ("cpu", "tpu")),
    # Folds scales behind convolutions into their weights. MobileNetV2: 0.95; ResNet-50: 0.965.
    Pass("fold_batchnorm", _imported("any.fold_batchnorm", "fold"), _has_convolution, None),
    # Puts images channels last and lowers each convolution in its fastest way. ResNet-50: 0.5; MobileNetV2: 0.2.
    Pass(
        "layout_assignment",
        _imported("cpu.layout_assignment", "assign_layouts", lambda options: lambda: options.onednn),
        _has_convolution,
    ),
    # Lowers the other convolutions, each by itself: those in loops, and all on other platforms.
    Pass("lower_convolutions", _imported("any.lower_convolutions", "lower"), platforms=None),
    # Stores weights as [out, in] that one row is multiplied by. A decoding step of GPT-2: 0.93.
    Pass("dot_layout", _imported("cpu.dot_layout", "transpose_row_weights")),
    # Calls oneDNN for products and convolutions of int8. ResNet-18 in int8: 0.5 (jaxlib 0.10 alone).
    Pass("onednn", _imported("cpu.onednn", "call_onednn"), _calls_onednn),
    # Multiplies int8 in float32 where the processor has no VNNI. opennsfw in int8: 0.2, with AVX2.
    Pass(
        "int8_in_float32",
        _imported("cpu.int8_in_float32", "multiply_in_float32"),
        lambda _program, _options: not compat.has_int8_kernels(),
    ),
    # Hoists parameter-only subexpressions out of the call. MiniLM with int8 weights dequantised: 0.34.
    Pass("hoist_params", _imported("any.hoist_params", "hoist"), platforms=None),
    # Unrolls loops of few steps, where loops are serial. A decoder in int4, each layer a call: 0.7 on two cores.
    Pass("unroll_loops", _imported("cpu.unroll_loops", "unroll_loops"), lambda _program, _: compat.has_serial_loops()),
    # Materialises what several equations read. 16 residual blocks of 1x1 convolutions: 0.34; ResNet-50: 0.98.
    Pass("prevent_recompute", _imported("cpu.prevent_recompute", "materialise_shared")),
    # Splits a large batch of images into microbatches. 8 images by MobileNetV2: 0.59; by ResNet-50: 0.92.
    Pass(
        "microbatch",
        _imported("cpu.microbatch", "split_batch"),
        lambda program, _: program.has("conv_general_dilated") or program.has("ffi_call"),
    ),
)
"""Over the program of a call."""
TRAINING_PASSES: Final = (
    # Puts images channels last, forward and backward. A step of MobileNetV2: 0.48; ResNet-50: 0.77; UNet: 0.94.
    Pass("layout_assignment", _imported("cpu.train_conv", "assign_layouts"), _has_convolution),
    # Swaps operands of products that are read transposed. Four layers of BERT: 0.93; 128 x 512 alone: 0.52.
    Pass("dot_transpose", _imported("cpu.dot_layout", "swap_transposed")),
)
"""Over a training step, whose state changes with every call: nothing is hoisted."""
CONV_LIBRARY: Final = "conv_library"
"""Passes of XLA rather than a rewrite (``passes/cpu/conv_lowering.py``)."""
HOST_PASS: Final = "fuse_host_nodes"
"""Over host nodes rather than a program (``runtime/host_plan.py``)."""
NAMES: Final = (*dict.fromkeys(p.name for p in (*PASSES, *TRAINING_PASSES)), CONV_LIBRARY, HOST_PASS)


def run(closed: Any, parameters: int, options: Passes) -> SplitProgram:
    """The program after all passes, with what is hoisted out of it.

    Args:
        closed: the ClosedJaxpr as it was traced.
        parameters: how many of its arguments, the first of them, are parameters of the model.
        options: which passes run.
    """
    with compat.on_platform(options.platform, keeps_convolutions=True):
        new, program = _rewritten(PASSES, closed, parameters, options)
    from .passes.any.hoist_params import without_hoisting

    hoisted = without_hoisting(parameters) if program is None or program.hoisted is None else program.hoisted
    return replace(hoisted, main=new)


def compiler_options(main: Any, options: Passes) -> dict[str, bool | str] | None:
    """XLA's options for a program after all passes; None for its own."""
    if options.platform != "cpu" or CONV_LIBRARY in options.skip:
        return None
    from .passes.cpu import conv_lowering

    return guarded(CONV_LIBRARY, lambda: conv_lowering.library_options(main))


def run_training(closed: Any, state: int, options: Passes) -> Any:
    """The ClosedJaxpr of a training step after all passes over it.

    Args:
        closed: as it was traced.
        state: how many of its arguments, the first of them, are the leaves of its state.
        options: which passes run.
    """
    if closed.effects:  # such as a user's jax.debug.print, whose order counts
        return closed
    return _rewritten(TRAINING_PASSES, closed, state, options)[0]


def with_passes(function: Callable[..., Any], skip: Collection[str] = ()) -> Callable[..., Any]:
    """The function with its jaxpr rewritten by the training passes; its first argument is the state.

    Args:
        function: a training step.
        skip: names of passes that do not run.
    """

    @wraps(function)
    def inside(*args: Any) -> Any:
        options, assigns = Passes().skipping(*skip), "layout_assignment" not in skip
        closed, results = _traced_for_cpu(function, args, assigns)
        if assigns and not _lowers_convolutions(closed):  # then their forms for a CPU are differentiated
            options = options.skipping("layout_assignment")
            closed, results = _traced_for_cpu(function, args, False)
        program = run_training(closed, len(jax.tree.leaves(args[0])), options)
        return jax.tree.unflatten(jax.tree.structure(results), as_function(program)(*jax.tree.leaves(args)))

    return inside


def _traced_for_cpu(function: Callable[..., Any], args: Sequence[Any], keeps_convolutions: bool) -> Any:
    """The ClosedJaxpr of a function, and the types of its results."""
    with compat.on_platform("cpu", keeps_convolutions):
        return jax.make_jaxpr(partial(function), return_shape=True)(*args)  # a new function: JAX keeps traces of each


def _lowers_convolutions(closed: Any) -> bool:
    """Whether the training passes lower all convolutions of a program, if it has some."""
    program = guarded("read", lambda: Program.of(closed))
    if program is None or not program.any(is_convolution):
        return True
    if closed.effects:  # no pass runs
        return False
    from .passes.cpu.train_conv import pays

    return pays(program)


def _rewritten(passes: Sequence[Pass], closed: Any, parameters: int, options: Passes) -> tuple[Any, Program | None]:
    """The ClosedJaxpr after passes, and its program; None where that is the one that was given."""
    first = program = guarded("read", lambda: Program.of(closed, parameters, options.platform))
    if program is None:
        return closed, None
    before: list[str] = []
    for each in passes:
        if each.name not in options.skip and (each.platforms is None or options.platform in each.platforms):
            rewritten = guarded(each.name, partial(_applied, each, program, options), before)
            if rewritten is not None and rewritten is not program:
                program, before = rewritten, [*before, each.name]
    new = None if program is first else guarded("write", program.closed, before)
    return (closed, None) if new is None else (new, program)


def _applied(each: Pass, program: Program, options: Passes) -> Program:
    """The program after a pass."""
    new = each.rewrite(program, options) if each.applies(program, options) else program
    if debug.level() >= 3:
        counts = f"{len(program.equations)} equations before, {len(new.equations)} after"
        debug.emit(f"{each.name}: {counts}\n{new.closed()}")
    return new


Result = TypeVar("Result")


def guarded(name: str, step: Callable[[], Result], before: Sequence[str] = ()) -> Result | None:
    """The result of a step; None after a warning where it fails, with the passes that rewrote the program before."""
    try:
        return step()
    except Exception as error:
        if name not in _failed:
            _failed.add(name)
            skipped = {"skip": [name]} if name in NAMES else False
            after = f" after {', '.join(before)}" if before else ""
            warnings.warn(
                f"the pass {name!r} failed{after} ({type(error).__name__}: {error}); programs run without it, perhaps "
                f"slower. Please report this. To skip it: convert(..., optimize={skipped})",
                OptimizationWarning,
                stacklevel=2,
            )
        return None


_failed: set[str] = set()
"""Names of steps that have warned."""
