"""From a file to a Model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import jax
from jax.sharding import Mesh, PartitionSpec

from ..checker.check import check_message
from ..errors import ShardingError
from ..ir import binding
from ..ir.file import Reading, opened
from ..ir.graph import Imported
from ..ir.importer import Importer
from ..proto.origin import Origin
from ..proto.walk import tensors
from ..runtime.evaluate import Settings
from ..sharding.configurations import by_count, placement
from ..sharding.plans import Plan
from ..sharding.processes import several, together
from ..sharding.rules import Placement
from ..sharding.stages import Staged
from .changes.max_size import with_max_size
from .changes.pack import with_packed
from .changes.rebatch import rebatched
from .changes.unpack import with_weights
from .devices.balance import costs
from .model import Model


def convert(
    source: Any,
    *,
    static: Mapping[str, Any] | None = None,
    dim_overrides: Mapping[str, int] | None = None,
    bucket: Mapping[str, Sequence[int]] | None = None,
    max_size: Mapping[str, int] | None = None,
    max_trips: int | None = None,
    rebatch: bool | Mapping[str, int] = False,
    weights: Any = None,
    warn_after: int = 16,
    optimize: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
    mesh: Mesh | None = None,
    shardings: Mapping[str, PartitionSpec] | str | Plan | None = None,
    device_configuration: str | None = None,
    devices: Mapping[Any, jax.Device] | Sequence[jax.Device] | None = None,
    stages: int | None = None,
    microbatches: int = 1,
    **reading: Unpack[Reading],
) -> Model:
    """Turn an ONNX model into a JAX function.

    Args:
        source: a path, the bytes of a file, an open binary file, an ``onnx.ModelProto``, or what ``read`` returned.
        static: values for inputs, fixed now. Needed only for a jit of your own around a model whose shapes
            depend on the values of inputs; a plain call finds them by itself.
        dim_overrides: extents for dimension variables, fixed now: ``{"batch": 8}``.
        bucket: sizes to which a call pads a dimension variable with zeros, so that few shapes are compiled:
            ``{"seq": [64, 128]}``. Outputs that declare the variable are cut back. Right only if the model masks
            what is padded (an attention mask among the inputs, say): the first call that pads runs without padding
            too, and raises BucketError where an output differs. What draws random numbers is not compared.
        max_size: sizes, by node name, for nodes whose output shape depends on data (NonZero, NonMaxSuppression,
            Unique, Compress, and the scan outputs of a Loop whose trips depend on data): ``{"nms": 100}``. Their
            results are padded to it and the whole model is one jit, for transformations of your own. Each such node
            adds an output ``name/count``, how many entries are real; a plain call raises when they are more than
            the size, in a jit of your own compare them yourself.
        max_trips: trips after which a Loop is an error; without it an endless loop runs for ever.
        rebatch: take any multiple of the batch size that the model is made for (1 where its inputs leave it free), and
            give what each such group of samples gives alone: one program, by ``jax.vmap``. True: the batch is the first
            axis of every input; otherwise its axis by input, ``{"x": 0, "state": 1}``, inputs left out being the same
            for all samples. Outputs have it where their declaration alone has it, and else, with True, on the first
            axis; any other axis along which to join what the groups give is named likewise, ``{"x": 0, "y": 1}``. One
            number for each sample becomes a vector.
        weights: a floating type, "float32" or "bfloat16", in which weights that the file packs in 2, 4 or 8 bits
            (MatMulNBits, MatMulBnb4, MatMulBlockQuantizedFp4Weight and Fp8Weight) are kept; packed as they are when
            left out, and unpacked on the way. "packed": matrices behind DequantizeLinear stay packed, too, as
            MatMulNBits has them; otherwise they are unpacked once, to float.
        warn_after: compilations of one stage after which a RecompilationWarning says why and what to do.
        optimize: optimise what is compiled for a CPU: channels lie last, and what weights alone decide is computed
            once, not in every call. False leaves it as it was traced.
            Your own ``jit`` or ``grad`` around ``model.apply`` is left as it is.
        cache_dir: a folder for compiled programs. What a process has compiled for a CPU the next one, of the same
            versions and on the same kind of processor, reads in place of tracing and compiling; weights are no part of
            it. Trust it as you trust code; anything in it may be deleted. Other devices, operators of your own, and
            programs that call libraries of linear algebra are compiled as ever: JAX's own cache is for them.
        mesh: devices to run on, as ``jax.make_mesh`` makes them. Inputs lie with their first axis over the mesh's
            first where that divides it; weights are on every device, unless ``shardings`` says otherwise.
        shardings: patterns over the names of weights and inputs, each with a spec over the mesh's axes; the first that
            matches counts: ``{"*.weight": PartitionSpec(None, "model")}``. Or a plan that is found in the graph, over
            the mesh's axes ``data`` and ``model``: "data", "fsdp", "tensor", "data+tensor", "fsdp+tensor"; with other
            names of axes and rules of your own, ``Plan("tensor", model="tp", rules={...})``.
        device_configuration: the name of one of the file's own device configurations, to be followed. Without it
            they are ignored; results are the same.
        devices: the devices of that configuration, by label or number or in order; those of JAX when left out.
            Where it gives nodes pipeline stages, and these devices of their own, each stage runs on its own.
        stages: into how many stages the nodes are divided, alike in FLOPs and bytes of weights, each a program on
            devices of its own: the slices of ``mesh`` along its axis "stage", along whose other axes each is divided
            as ``shardings`` says; the first devices when there is no mesh. The model is then called, and
            differentiated, outside of ``jax.jit``.
        microbatches: parts of a batch that go through the stages one behind the other, so that all compute at once.
            Right only where the samples of a batch do not mix: the first call also runs the whole batch at once, and
            raises ShardingError where an output differs. What draws random numbers is not compared.
        **reading: how to read the file: ``strict``, ``external_data_dir`` and the other keywords of ``read``.

    Returns:
        A Model.

    Raises:
        ModelError: the file is no ONNX model or breaks a rule of the format.
        UnsupportedOperatorError: nothing serves some of its operators; the message lists all of them.
        OperatorError, UnsupportedError: operators refuse the values of attributes; the message lists all of them.
        ShardingError: a rule does not fit an array or the mesh, or there is no such device configuration.
        ProcessError: the mesh is over several processes, and they differ in the file or in arguments.
        RebatchError: ``rebatch`` leaves open where the batch is. What shows while compiling, the first call raises.
        FileNotFoundError: no such file.

    >>> import onnx2jax
    >>> model = onnx2jax.convert(onnx2jax.demo_model())
    >>> model.inputs[0].name
    'image'
    """
    folder = None if cache_dir is None else Path(cache_dir)
    with together(mesh, "convert") as said:
        importer = open_model(source, reading)
        imported = importer.model()
        binding.check_served(imported.missing, imported.refused)
        imported = with_max_size(imported, max_size or {})
        if isinstance(weights, str) and weights == "packed":
            imported = with_packed(imported)
        elif weights is not None:
            imported = with_weights(imported, weights)
        if rebatch:
            imported = rebatched(imported, rebatch, static or {})
        placed = _placed(imported, mesh, shardings, device_configuration, devices, stages, microbatches)
        model = Model(
            imported,
            Settings(max_trips, warn_after, placed.constrain if placed else None, optimize, cache_dir=folder),
            static=static or {},
            dim_overrides=dim_overrides or {},
            bucket=bucket or {},
            max_size=max_size or {},
            origin=Origin(importer.message, importer.files),
            placement=placed,
        )
        told = (static, dim_overrides, bucket, max_size, max_trips, rebatch, str(weights), optimize, stages)
        said.same(seen(placed, model.origin, told))
    if mesh is None and placed is not None:  # a configuration of the file: the devices are known only now
        with together(placed.mesh, "convert") as said:
            said.same(seen(placed, model.origin, told))
    return model


def _placed(
    imported: Imported,
    mesh: Mesh | None,
    shardings: Mapping[str, PartitionSpec] | str | Plan | None,
    device_configuration: str | None,
    devices: Mapping[Any, jax.Device] | Sequence[jax.Device] | None,
    stages: int | None,
    microbatches: int,
) -> Placement | None:
    """Where weights and inputs lie, as ``convert`` was told; None on one device."""
    if stages is None:
        placed = placement(imported, device_configuration, devices, mesh, shardings, microbatches=microbatches)
    elif device_configuration is not None:
        raise ShardingError("stages= are found in the graph, device_configuration= has those of the file: give one")
    else:
        placed = by_count(imported, stages, microbatches, mesh, shardings, partial(costs, imported))
    if isinstance(placed, Staged) and several(placed.mesh):
        raise ShardingError("stages lie on devices of one process: a mesh of jax.local_devices()")
    return placed


def seen(placed: Placement | None, origin: Origin | None, told: Any) -> dict[str, Any]:
    """What has to be the same in all processes over whose devices a model lies."""
    if placed is None or not several(placed.mesh):
        return {}
    return {"the file": origin and origin.digest(), "mesh= or shardings=": str(placed), "another argument": told}


def open_model(source: Any, reading: Reading) -> Importer:
    """What imports a source, checked as ``read`` was told.

    Raises:
        ModelError: the file is no ONNX model, or breaks a rule of the format.
    """
    file, message, files = opened(source, reading)
    newer, documents = file.allow_newer_opset, file.documents
    if file.strict:
        check_message(message, files, allow_newer_opset=newer, documents=documents).raise_errors()
    if file.verify_checksums:
        for tensor, _ in tensors(message):
            files.verify(tensor)
    return Importer(message, files, file.strict, newer, None, documents)
