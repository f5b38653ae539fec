"""``convert``: converts an ONNX file to a Model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack

import jax
from jax.sharding import Mesh, PartitionSpec

from .. import progress
from ..checker.types import check_types
from ..errors import (
    DeviationWarning,
    InputTypeError,
    MissingExtraWarning,
    ModelError,
)
from ..ir import binding, loops
from ..ir.file import Reading, check_keywords, opened
from ..ir.graph import Imported
from ..ir.importer import Importer
from ..proto.messages import tensors
from ..proto.origin import Origin
from ..sharding.processes import in_agreement
from .build import built, compare_processes
from .model import Model
from .options import Options

if TYPE_CHECKING:
    from ..sharding.plans import Plan


def convert(
    source: Any,
    *,
    # shapes
    dims: Mapping[str, int] | None = None,
    static: Mapping[str, Any] | None = None,
    bucket: Mapping[str, Sequence[int]] | None = None,
    rebatch: bool | Mapping[str, int] = False,
    max_size: Mapping[str, int] | None = None,
    max_trips: int | None = None,
    # numbers
    dtype: Any = None,
    float32: str | Iterable[str] = (),
    outputs: Literal["declared", "compute"] = "declared",
    weights: Any = None,
    # execution
    optimize: bool | Mapping[str, Sequence[str]] = True,
    scan_layers: bool | Literal["calls"] | None = None,
    background_compile: bool = False,
    cache_dir: str | os.PathLike[str] | bool | None = True,
    warn_after: int = 16,
    platform: Literal["cpu", "cuda", "rocm", "tpu"] | None = None,
    # devices
    mesh: Mesh | None = None,
    shardings: Mapping[str, PartitionSpec] | str | Plan | None = None,
    stages: int | None = None,
    microbatches: int = 1,
    device_configuration: str | None = None,
    devices: Mapping[Any, jax.Device] | Sequence[jax.Device] | None = None,
    # reading
    loop_cond: Literal["onnx", "onnxruntime"] = "onnx",
    **reading: Unpack[Reading],
) -> Model:
    """Turn an ONNX model into a JAX function.

    Args:
        source: a path, the bytes of a file, an open binary file, an ``onnx.ModelProto``, or the result of ``read``.

    Args: Shapes
        dims: extents for dimension variables, fixed now: ``{"batch": 8}``. A free dimension without a name is
            called by its input and axis: ``{"x_0": 8}``.
        static: values of inputs, fixed now and copied. Needed only under your own jit, for inputs whose values decide
            shapes; a plain call specialises on them by itself.
        bucket: sizes to which a call pads a dimension variable with zeros, so that few shapes are compiled:
            ``{"seq": [64, 128]}``; names are those of ``dims``. Outputs that have the dimension are sliced back. An
            extent above the largest size is compiled for itself. Right only if the model masks the padding (by an
            attention mask, say): the first call that pads also runs without padding, and raises BucketError if an
            output differs. Models that draw random numbers are not compared.
        rebatch: accept any multiple of the model's batch size (1 where its inputs leave it free), and return what each
            group of that many samples returns alone: one program, by ``jax.vmap``. True: the batch is the first
            axis of every input; otherwise its axis by input, ``{"x": 0, "state": 1}``; inputs left out are the same
            for all samples. The batch axis of an output is the one axis that declares the batch, or, with True, the
            first; name any other axis along which to concatenate the groups likewise, ``{"x": 0, "y": 1}``. A scalar
            for each sample becomes a vector.
        max_size: sizes, by node name, for nodes whose output shape depends on data (NonZero, NonMaxSuppression,
            Unique, Compress, and the scan outputs of a Loop whose trips depend on data): ``{"nms": 100}``. Their
            results are padded to the size, so the whole model is one jit, which you can transform. Each such node
            adds an output ``name/count``, the number of entries before padding; a plain call raises when it exceeds
            the size, in your own jit compare it yourself.
        max_trips: trips after which a Loop raises; without it an endless loop runs for ever.

    Args: Numbers
        dtype: "bfloat16" or "float16": computes a float32 file in it, with weights in that type. Products and
            convolutions accumulate in float32; norms, softmax, powers, long sums, positions and masks stay float32;
            float64, integers and all else stay as they are. Inputs may be given in either type.
            "float32" and "float64": computes narrower floats in it, with parameters in it: float16 and bfloat16, and
            for float64 float32 too. Inputs and outputs are declared in it, and inputs may be given in narrower types.
            A Cast to a narrower type rounds nothing, and random numbers are drawn in it. In float64 your own ``jit``
            and ``grad`` belong inside ``jax.enable_x64(True)``, as for a float64 file: outside, JAX casts their
            arguments to float32.
        float32: names of nodes, or patterns such as ``"encoder/norm*"``, that stay in float32 under ``dtype``, with
            their weights: those where a verification shows that rounding costs too much.
        outputs: "declared" returns outputs in the file's types, float32 without a last rounding; "compute" returns
            float32 outputs in ``dtype``. In float32 and float64 both return that type.
        weights: a floating type, "float32" or "bfloat16", to which weights that the file packs in 2, 4 or 8 bits
            (MatMulNBits, MatMulBnb4, MatMulBlockQuantizedFp4Weight and Fp8Weight) are unpacked once; without it they
            stay packed, and are unpacked in every call. "packed": matrices behind DequantizeLinear stay packed, too,
            as for MatMulNBits; otherwise they are unpacked once, to float.

    Args: Execution
        optimize: optimise programs between trace and XLA: hoist parameter-only subexpressions, fold BatchNorm into
            convolutions, and on a CPU assign channels-last layouts, among others. False leaves programs as traced,
            ``{"skip": [names]}`` skips some passes. Your own ``jit`` or ``grad`` around ``model.apply`` is not
            optimised.
        scan_layers: evaluate repeated layers as one ``jax.lax.scan`` over their stacked weights: the layer is traced
            and compiled once, however many there are. Parameters, gradients, shardings and saved files stay those
            of the layers, and ``model.explain()`` says which of them were rolled. Calls are slower on a CPU. With
            ``finetune(remat=True)`` gradients recompute the values inside of each layer. "calls" compiles the layer
            once, too, and calls it for each layer in turn: no weights are stacked, and each call costs dispatch; your
            own ``jit`` around the model compiles all layers. None, the default, chooses "calls" for ``decoder`` where
            layers are large, on a CPU; False never does.
        background_compile: do not wait for XLA: calls are evaluated by NumPy, operator after operator, until a thread
            has compiled their program, which it starts to do after the second call of a signature. Results of NumPy
            and of XLA are equally exact and differ in their last bits. For models on one CPU whose operators NumPy
            has; others compile with their first call, as do models that draw random numbers and calls with
            ``bucket``, ``max_size`` or a mesh. ``model.compile`` waits. A process ends when the thread is done.
        cache_dir: a folder for compiled programs; left out (True), that of the environment variable
            ``ONNX2JAX_CACHE_DIR``, or ``onnx2jax`` in the user's folder of caches where that is not set; None, False or
            an empty variable for none. A later process, of the same versions and on the same kind of CPU, loads them in
            place of tracing and compiling; they contain no weights. Programs for other devices and meshes, of training
            steps and layers, and with custom operators are traced there, but not compiled. Trust the folder as you
            trust code; anything in it may be deleted, and beyond 2 GB the least recently used are. While JAX's own
            cache is on (``jax_compilation_cache_dir``), nothing is stored here. In a folder that is named, programs on
            one CPU are compiled without oneDNN, which cannot be stored; in the user's own, such programs are not kept.
        warn_after: compilations of one subprogram after which a RecompilationWarning names the cause and the fix.
        platform: trace programs for one platform, in its form of each operator, so that their jaxprs have no branches
            by platform (``lax.platform_dependent``): for ``jax.make_jaxpr`` and what reads jaxprs.

    Args: Devices
        mesh: devices to run on, from ``jax.make_mesh``. Inputs are sharded along their first axis over the mesh's
            first where it divides the extent; weights are replicated unless ``shardings`` shards them.
        shardings: patterns over the names of weights and inputs, each with a spec over the mesh's axes; the first that
            matches counts: ``{"*.weight": PartitionSpec(None, "model")}``. Or a plan derived from the graph, over
            the mesh's axes ``data`` and ``model``: "data", "fsdp", "tensor", "data+tensor", "fsdp+tensor"; with other
            names of axes and rules of your own, ``Plan("tensor", model="tp", rules={...})``.
        stages: number of pipeline stages, balanced by FLOPs and bytes of weights. Each is a program on its own devices:
            the slices of ``mesh`` along its axis "stage", sharded over the other axes by ``shardings``; the first
            devices without a mesh. Such a model is called, and differentiated, outside of ``jax.jit``.
        microbatches: number of microbatches that pass through the stages in turn. Right only where the samples of a
            batch do not mix: the first call also runs the whole batch at once, and raises ShardingError if an output
            differs. Models that draw random numbers are not compared.
        device_configuration: the name of a device configuration in the file, to apply. Without it they are ignored;
            results are numerically equal.
        devices: the devices of that configuration, by label or number or in order; ``jax.devices()`` when left out.
            If it assigns nodes to pipeline stages with their own devices, each stage runs on its own.

    Args: Reading
        loop_cond: what a Loop without condition input makes of the condition that its body returns: ignores it ("onnx",
            with a DeviationWarning), or ends when it is false ("onnxruntime", and meant by files of onnxscript).
        **reading: how to read the file: ``strict``, ``external_data_dir`` and the other keywords of ``read``.

    Returns:
        A Model.

    Raises:
        ModelError: the file is no ONNX model or breaks a rule of the format.
        UnsupportedOperatorError: some operators are unsupported; the message lists all of them.
        OperatorError, UnsupportedError: attributes have unsupported values; the message lists all of them.
        ShardingError: a rule does not match an array or the mesh, or the device configuration does not exist.
        ProcessError: the processes of the mesh have different files or arguments.
        UnsupportedError: ``scan_layers`` finds no repeated layers; the message names the first nodes that differ.
        RebatchError: the batch axes are ambiguous; what only compiling shows, the first call raises.
        FileNotFoundError: no such file.

    >>> import onnx2jax
    >>> model = onnx2jax.convert(onnx2jax.demo_model())
    >>> model.inputs[0].name
    'image'
    """
    options = Options(**{name: value for name, value in locals().items() if name not in ("source", "reading")})
    check_keywords(reading, convert)
    if isinstance(source, Model):
        raise InputTypeError(
            f"{source.graph.name!r} is a Model already; to change its options: model.with_options(...)"
        )
    with in_agreement(mesh, "convert") as agreed, progress.stage(f"converting {_label(source)}"):
        importer = open_model(source, reading)
        imported = importer.model()
        binding.check_supported(imported.unsupported, imported.rejected)
        deviations = check_operands(importer)
        _warn_of_deviations(imported, loop_cond, deviations)
        for text in binding.missing_extras(imported.graph):
            warnings.warn(text, MissingExtraWarning, stacklevel=2)
        spec = built(imported, options, Model, Origin(importer.message, importer.files), agreed)
    compare_processes(spec)
    return Model(spec)


def _label(source: Any) -> str:
    """The name of a source, for a message."""
    return os.path.basename(os.fspath(source)) if isinstance(source, str | os.PathLike) else "a model"


def check_operands(importer: Importer) -> list[str]:
    """A text for each type of operand that an operator's schema does not allow, but whose meaning is plain.

    Raises:
        ModelError: an operand has a type of which the operator has no meaning (rule ND-09).
    """
    wrong, plain = dict[str, str](), dict[str, str]()

    def note(rule: str, _severity: str, where: str, text: str) -> None:
        if rule == "ND-09":
            wrong.setdefault(text, where)

    def deviate(_rule: str, _severity: str, where: str, text: str) -> None:
        plain.setdefault(text.partition(" is ")[2], f"{where}: {text}")

    check_types(importer.message, importer.opsets, note, deviate)
    if wrong:
        lines = [f"{where}: {text}: put a Cast before it" for text, where in wrong.items()]
        raise ModelError("\n".join(lines[:10]), rule="ND-09")
    fix = "it is computed in that type. To make the file valid, put a Cast before it"
    return [f"{text}; {fix}" for text in plain.values()]


def _warn_of_deviations(imported: Imported, loop_cond: str, operands: Sequence[str]) -> None:
    ignored = loops.ignored_conditions(imported.graph) if loop_cond == "onnx" else ()
    for text in (*imported.deviations, *operands, *(f"{node}: {loops.IGNORED_CONDITION}" for node in ignored)):
        warnings.warn(text, DeviationWarning, stacklevel=3)


def open_model(source: Any, reading: Reading) -> Importer:
    """The importer of a source, checked by the options of ``read``.

    Raises:
        ModelError: the file is no ONNX model, or breaks a rule of the format.
    """
    file, message, files = opened(source, reading)
    newer, documents = file.allow_newer_opset, file.documents
    if file.strict:
        from ..checker.check import check_message

        check_message(message, files, allow_newer_opset=newer, documents=documents).raise_errors()
    if file.verify_checksums:
        for tensor, _ in tensors(message):
            files.verify(tensor)
    return Importer(message, files, file.strict, newer, None, documents)
