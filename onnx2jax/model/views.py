"""A Model's methods that report on it, or derive another model from its graph: each imports what it needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from .. import compat
from ..errors import known_keywords, names_list
from ..ir.graph import Graph
from ..proto.types import ValueInfo
from .calls.arguments import by_name, check_untraced
from .parameters import Parameters

if TYPE_CHECKING:
    from .reports.comparison import Verification
    from .reports.profile import Profile
    from .reports.summary import Summary


class Views(Parameters):
    """A Model's methods that report on it, or derive another model from its graph."""

    graph: Graph
    inputs: tuple[ValueInfo, ...]
    optional: Mapping[str, ValueInfo]

    @known_keywords
    def cut(self, *, inputs: str | Sequence[str] = (), outputs: str | Sequence[str] = ()) -> Self:
        """The subgraph between some values of the main graph, as a model, which ``save`` writes.

        Args:
            inputs: values that become inputs, of declared or inferred types; the model's inputs remain if they are
                still read.
            outputs: values that become the outputs; the model's own when left out. With ``rebatch``, their groups are
                joined as by ``values``.

        Raises:
            InputNameError: there is no such value.
            RebatchError: the batch axis of a new input of a rebatched model is unknown.

        >>> import numpy as np, onnx2jax
        >>> model = onnx2jax.convert(onnx2jax.demo_model())
        >>> node = model.graph.nodes[0]
        >>> model.cut(outputs=node.outputs)(np.zeros((1, 1, 8, 8), np.float32)).shape[0]
        1
        """
        from .changes import parts

        graph, origin = parts.cut(self.graph, inputs, outputs), self.spec.origin
        if origin is not None:
            whole = self.graph if self.spec.source is None else self.spec.source.imported.graph
            ends = tuple(names_list(inputs)), tuple(v.name for v in graph.outputs)
            origin = origin.changed(parts.FilePart(*ends, whole))
        return parts.with_graph(self, graph, origin=origin)

    def values(self, /, *args: Any, names: str | Sequence[str] = "*", rng: Any = None, **named: Any) -> dict[str, Any]:
        """The outputs of nodes of the main graph in a call, by name, in graph order; computed by another program.

        Inside your own jit it is traced like the model. Only the values named are materialised. With ``rebatch``,
        groups of samples are concatenated along the first axis if that is the batch, otherwise stacked along a new one.

        Args:
            *args, **named: inputs, as for a call; pass one that is called ``names`` by position.
            names: patterns as in a shell (``*``, ``?``, ``[ab]``) over ONNX names; a name itself matches too.
            rng: random key, as for a call.

        Raises:
            InputNameError: a pattern matches nothing.
            InputError: the arguments do not match ``model.inputs``.

        >>> import numpy as np, onnx2jax
        >>> model = onnx2jax.convert(onnx2jax.demo_model())
        >>> values = model.values(np.zeros((1, 1, 8, 8), np.float32), names=["logits", "*conv*"])
        >>> values["logits"].shape
        (1, 10)
        """
        from .changes import parts

        wanted = tuple(parts.matching(self.graph, names))
        models = self._runtime.inner_models
        if wanted not in models:
            models.clear()  # each holds a program, and its parameters on devices
            models[wanted] = parts.with_outputs(self, wanted)
        results = models[wanted](*args, rng=rng, **named)
        return dict(zip(wanted, results if len(wanted) > 1 or self.spec.max_size else (results,), strict=False))

    def replace(self, functions: Mapping[str, Callable[[Any], Any]]) -> Self:
        """The model with functions applied to some values before their readers: for probes, ablation, patching.

        Args:
            functions: functions by pattern, as in ``values``, over outputs of nodes of the main graph. A function takes
                the value and returns one of the same element type and shape. It is traced by JAX, and differentiated,
                like the model; for nodes on the host, and values that shapes depend on, it gets NumPy arrays. If
                several patterns match a value, they apply in order. To print a value, call ``jax.debug.print``.

        Returns:
            A Model for calls and transformations; a file cannot hold the functions, so ``save`` refuses it.

        Raises:
            InputNameError: a pattern matches nothing.
            InputTypeError: a function cannot be called with the value alone.

        >>> import jax.numpy as jnp, numpy as np, onnx2jax
        >>> model = onnx2jax.convert(onnx2jax.demo_model())
        >>> silent = model.replace({"logits": jnp.zeros_like})
        >>> float(silent(np.ones((1, 1, 8, 8), np.float32)).max())
        0.0
        """
        from .changes import parts

        options: dict[str, Any] = {"bucket": self.spec.bucket, "max_size": self.spec.max_size}
        if compat.is_transformed():
            options["settings"] = replace(self.spec.settings, is_traced=True)
        return parts.with_graph(self, parts.replaced(self.graph, functions), **options)

    @known_keywords
    def simplified(self, *, merge_products: bool = False) -> Self:
        """The model with a smaller graph: what it computes of weights and declared shapes alone is computed now.

        - Nodes whose operands are constants become initializers, unless those would take more memory than what they
          replace and more than 16 KiB, or a weight would be there twice. DequantizeLinear stays: weights stay packed.
          Floating ones of several elements are parameters, as those of Constant nodes are.
        - BatchNormalization in inference, and constants multiplied or added per channel, go into the weights of the
          convolution or Gemm before; BatchNormalization into those of a convolution without padding behind, too.
        - Identity, Dropout in inference, Cast to the same type, Reshape to the same shape, two Transposes that cancel,
          and the like are removed, and so are nodes and initializers that nothing reads; equal nodes become one.
        - An If of the main graph whose condition is constant becomes the nodes of the branch taken, with unique names;
          unless these draw random numbers.
        - The target of a Reshape is a constant, where dimension variables in it are copied or inferred.

        That goes for the branches and bodies of If, Loop and Scan, too. Names of inputs, outputs and of the weights
        that remain are kept; functions and metadata stay as they are. Initializers that are inputs as well stay, as
        callers may override them. Extents fixed by ``dims`` are fixed in the saved file.

        Args:
            merge_products: Whether MatMuls of one input by several weights, such as query, key and value, become one
                MatMul by their concatenation, and a Split. XLA on GPUs and TPUs concatenates those weights in every
                call otherwise. Their columns can no longer be sharded by head, which ``mesh`` with
                ``shardings="tensor"`` does.

        Returns:
            A Model with parameters of its own, for calls, transformations and ``save``. Results are numerically equal
            within the rounding of scaled weights.

        Raises:
            UnsupportedError: the model is on a mesh, of another ``dtype`` or of unpacked weights, or its file has
                training_info.

        >>> import numpy as np, onnx.parser, onnx2jax
        >>> model = onnx2jax.convert(onnx.parser.parse_model('''<ir_version: 10, opset_import: ["" : 22]>
        ...     scaled (float[n, 2] x) => (float[n, 2] y) <float[2, 2] w = {1, 2, 3, 4}, float two = {2}>
        ...     { v = Mul(w, two) h = MatMul(x, v) i = Identity(h) y = Relu(i) }'''))
        >>> small = model.simplified()
        >>> [node.op_type for node in small.graph.nodes], small.params["v"].tolist()
        (['MatMul', 'Relu'], [[2.0, 4.0], [6.0, 8.0]])
        """
        from .changes.simplified import simplified

        return simplified(self, merge_products=merge_products)

    def verify(
        self,
        /,
        *args: Any,
        against: str | os.PathLike[str] | None = None,
        each_node: bool = False,
        rtol: float | None = None,
        atol: float | None = None,
        seed: int = 0,
        **named: Any,
    ) -> Verification:
        """Compare the model with another implementation running its file, and find the first node that differs.

        Args:
            *args, **named: inputs, as for a call; by default the test data next to the model's file
                (``test_data_set_0`` with ``input_0.pb``), or random numbers if there is none. Pass in a dict one that
                has the name of a keyword.
            against: ``"onnxruntime"``, ``"reference"`` (ONNX's own implementation), or a folder of test data with
                expected outputs; by default the test data next to the file, or else onnxruntime. Install both by
                ``pip install onnx onnxruntime``.
            each_node: compare every node of the main graph on the other implementation's operands. This is done anyway
                once an output differs, and in the bodies of loops and branches. A difference inside a function is
                reported at the node that calls it.
            rtol, atol: tolerances: ``atol + rtol * |theirs|``. Defaults by element type: 1e-4 for float32,
                1e-9 for float64, 1e-2 for float16, 5e-2 for bfloat16, one step for 8 bits, 0 for integers;
                ``atol`` is the same times the largest number of a tensor. NaN equals NaN.
            seed: the seed of random inputs.

        Returns:
            A Verification: ``ok``, the comparisons, and ``first``, the first difference, whose operands can be saved.

        Raises:
            InputError: the arguments do not match ``model.inputs``.
            UnsupportedError: the other implementation does not run the model.
            ImportError: it is not installed.

        >>> import onnx2jax
        >>> model = onnx2jax.convert(onnx2jax.demo_model())
        >>> model.verify(against="onnxruntime").ok
        True
        """
        from .reports.verify import verify

        check_untraced("verify", args, named)
        keywords = ["against", "each_node", "rtol", "atol", "seed"]
        inputs = by_name(self.inputs, self.optional, args, named, keywords) if args or named else None
        return verify(self, inputs, against, each_node, rtol, atol, seed)

    def summary(self, /, *args: Any, dims: Mapping[str, int] | None = None, **named: Any) -> Summary:
        """A table of the nodes: output shapes, parameters, FLOPs, bytes read and written.

        The model is traced, not run; one that needs the host runs once.

        Args:
            *args, **named: inputs as for a call: arrays, or shapes as tuples or ``jax.ShapeDtypeStruct``; the others
                are as declared. Pass in a dict one that is called ``dims``.
            dims: extents of dimension variables, 1 when left out.

        Raises:
            InputError: they do not match the model.

        >>> import onnx2jax
        >>> model = onnx2jax.convert(onnx2jax.demo_model())
        >>> found = model.summary(dims={"batch": 2})
        >>> found.nodes[-1].operator, dict(found.nodes[-1].outputs), found.nodes[-1].flops
        ('Gemm', {'logits': 'float32[2, 10]'}, 40980)
        """
        from .reports.summary import summary

        return summary(self, by_name(self.inputs, self.optional, args, named, ["dims"]), dims)

    def profile(self, /, *args: Any, calls: int = 20, rng: Any = None, **named: Any) -> Profile:
        """The time of a call by node and by operator, from XLA's profiler.

        The model is compiled once more, with a named scope for each node. If XLA fuses nodes, the time is that of the
        node whose result the fusion computes, and the others are listed with it.

        Args:
            *args, **named: inputs, as for a call; pass one that is called ``calls`` by position.
            calls: number of calls to record.
            rng: random key, as for a call.

        Returns:
            A Profile: seconds of a call by node and by operator, summed over threads; printed as a table, shown by
            notebooks as a chart.

        Raises:
            InputError: the arguments do not match ``model.inputs``.
            UnsupportedError: the profile names no node of the model.

        >>> import numpy as np, onnx2jax
        >>> model = onnx2jax.convert(onnx2jax.demo_model())
        >>> found = model.profile(np.zeros((16, 1, 8, 8), np.float32), calls=2)
        >>> found.nodes[0].seconds > 0, "Conv" in found.operators
        (True, True)
        """
        from .reports.profile import profile

        check_untraced("profile", args, named)
        return profile(self, args, named, rng, calls)

    @known_keywords
    def draw(
        self,
        path: str | os.PathLike[str],
        *,
        inputs: Any = None,
        dims: Mapping[str, int] | None = None,
        profile: Profile | None = None,
        verification: Verification | None = None,
    ) -> Path:
        """Write the graph as an interactive HTML page, which needs no network, or as a picture, for papers.

        The page shows name scopes as blocks that a click opens; repeated layers once; branches, bodies and functions
        inside their node. Constants and shape arithmetic are folded into the nodes that read them. A click on a node
        lists its attributes, operands with types and histograms, FLOPs and bytes, and violations of the ONNX
        specification. Models on a mesh are coloured by sharding.

        Args:
            path: the file, replaced if it exists; its folder is created. ``.html``, or ``.svg`` for a picture, without
                what the other arguments add.
            inputs: arrays by name, or the only input's: the page shows what nodes compute for them, by range, mean,
                share of zeros, NaN and a small image. All outputs of nodes of the main graph are materialised.
            dims: extents of dimension variables for FLOPs and bytes, 1 when left out.
            profile: the result of ``profile``: nodes are coloured by time.
            verification: the result of ``verify``: the page opens at the first node that differs.

        Returns:
            The path.

        Raises:
            InputError: ``inputs`` or ``dims`` do not match the model, or the name of the file ends otherwise.

        >>> import onnx2jax, tempfile
        >>> model = onnx2jax.convert(onnx2jax.demo_model())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.draw(f"{folder}/digits.html").read_text().count("<svg id=")
        1
        """
        from ..proto import atomic, files
        from .reports.drawing import is_picture, svg
        from .reports.page import facts, page

        path = files.path_of(path)
        text = svg(self.graph) if is_picture(path) else page(self, facts(self, inputs, dims, profile, verification))
        with atomic.replacing(path) as file:
            file.write(text.encode())
        return path

    @property
    def source(self) -> str:
        """The model as the text of a Python module over jax.numpy: ``print(model.source)``. ``to_source`` writes it.

        Raises:
            UnsupportedError: as ``to_source``.

        >>> import onnx2jax
        >>> model = onnx2jax.convert(onnx2jax.demo_model())
        >>> print(model.source.splitlines()[-3].strip())
        bn3 = batch_normalization(h, params["bn3.scale"], params["bn3.bias"], params["bn3.mean"], params["bn3.var"])
        """
        from .source import module

        return module.source(self.spec).text

    @known_keywords
    def to_source(self, folder: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the model as a Python module, to be read and edited: ``model.py``, and its weights beside it.

        Each node is an expression of jax.numpy or jax.nn, or else a function of ``onnx2jax.ops``. Repeated
        layers are one function in a loop over their parameters; If, Loop and Scan are ``lax.cond``, ``while_loop`` and
        ``scan``. Shape arithmetic, no-ops and what nothing reads are gone. Extents are numbers, or names of dimension
        variables: fix these first by ``convert(..., dims=)`` for shorter code.

        The module has ``load_params()`` and ``model(params, ...)``, a pure function which returns what ``apply``
        returns, of the same types: 64-bit values are computed in a scope of ``jax.enable_x64``.

        Args:
            folder: created if it does not exist; its files are ``model.py``, ``params.safetensors``, and where needed
                ``constants.safetensors`` and ``attributes.json``.
            overwrite: replace such files even if they were edited, or are somebody else's.

        Returns:
            The path of ``model.py``.

        Raises:
            UnsupportedError: the model is no single program, or has another ``dtype`` or a mesh; names the node.
            FileExistsError: the folder has such files, edited or not written by ``to_source``.
            ImportError: safetensors is not installed.

        >>> import onnx2jax, tempfile
        >>> model = onnx2jax.convert(onnx2jax.demo_model())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = model.to_source(folder)
        ...     sorted(p.name for p in path.parent.iterdir())
        ['model.py', 'params.safetensors']
        """
        from .source import module

        return module.write(self.spec, self.params, folder, overwrite)

    def _repr_html_(self) -> str:
        from .reports.card import card
        from .reports.page import PageFacts, page

        return card(self, self._runtime.program.rows(), page(self, PageFacts()))

    def explain_sharding(self, /, *args: Any, **named: Any) -> str:
        """The shardings of parameters on a mesh, and the collectives of a call, as tables.

        Args:
            *args, **named: inputs as for a call, or a ``jax.ShapeDtypeStruct`` for each. A program is compiled for
                them, as ``jax.jit(model.apply)`` would be; without them there is no second table.

        Returns:
            For each parameter its shape, spec, bytes on one device, and why a plan does not shard it; for each kind of
            collective the number in the compiled program, and the bytes of their results on one device. A collective
            inside a loop of the program is counted once.

        Raises:
            ShardingError: the model is on one device.
            InputError: the arguments do not match ``model.inputs``.
            KnownValueError: the model is no single program (see ``explain``).

        >>> import jax, onnx2jax
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> model = onnx2jax.convert(onnx2jax.demo_model(), mesh=mesh, shardings="data")
        >>> image = jax.ShapeDtypeStruct((8, 1, 8, 8), "float32")
        >>> print(model.explain_sharding(image).splitlines()[-1])
        collective-permute  0       0
        """
        from .devices.explained import explained

        return explained(self, args, named)
