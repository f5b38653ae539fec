"""At a terminal: ``onnx2jax run``, ``inspect``, ``check``, ``verify``, ``export``, ``draw``, ``generate``."""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from . import commands as more
from .checker.check import check
from .cli_draw import add_draw
from .cli_export import add_export
from .cli_generate import add_generate
from .errors import InputTypeError, OnnxError
from .ir import analysis
from .ir.graph import Function, Imported
from .model.convert import convert, open_model
from .model.model import Model
from .model.samples import random_value
from .proto.types import TensorType, ValueInfo
from .terminal import print_table

SHOWN = 12
"""Parameters that ``inspect`` lists unless asked for all."""


class CommandError(Exception):
    """Something on the command line that argparse cannot see is wrong."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0: done. 1: the model or the data is at fault, and standard error says how. 2: the command line is.
    1 also: ``check`` found errors. 3: ``inspect`` found operators that nothing serves.
    """
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.command(arguments)
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OnnxError, OSError, ImportError) as error:
        print("\n".join([f"error: {_said(error)}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return 1
    return status


def _said(error: Exception) -> str:
    """What an error says, without the number that the operating system gives it."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="onnx2jax", description="Run, inspect, check and verify ONNX models, and generate text with them."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run a model on files or random numbers")
    run.set_defaults(command=_run)
    run.add_argument("model", type=Path)
    run.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME=FILE.npy",
        help="an input's value; FILE.npz alone gives several; repeatable",
    )
    run.add_argument(
        "--random",
        action="store_true",
        help="fill the other inputs: normal floats; integers 0 or 1, which serve as masks and as indices",
    )
    run.add_argument("--seed", type=int, default=0, help="of --random (default: %(default)s)")
    run.add_argument(
        "--dim", action="append", default=[], metavar="NAME=N", help="a free dimension (default: 1); repeatable"
    )
    run.add_argument("--output-dir", type=Path, metavar="DIR", help="save each output as DIR/NAME.npy")
    run.add_argument("--output-file", type=Path, metavar="FILE.npz", help="save all outputs in one file")

    inspect = commands.add_parser("inspect", help="show inputs, outputs, parameters, operators, and which are missing")
    inspect.set_defaults(command=_inspect)
    inspect.add_argument("model", type=Path)
    inspect.add_argument("--json", action="store_true", help="print everything as JSON")
    inspect.add_argument("--all", action="store_true", help=f"list every parameter, not the {SHOWN} largest")

    checks = commands.add_parser("check", help="list everything that breaks the ONNX specification")
    checks.set_defaults(command=_check)
    checks.add_argument("model", type=Path)
    checks.add_argument("--json", action="store_true", help="print the findings as JSON")
    checks.add_argument(
        "--verify-checksums", action="store_true", help="compare checksums of external data, reading all of it"
    )
    checks.add_argument("--external-data-dir", type=Path, metavar="DIR", help="where external data lies")
    checks.add_argument("--follow-links", action="store_true", help="accept external data behind links")
    add_generate(commands)
    add_export(commands)
    add_draw(commands)
    more.add(commands)
    return parser


def _check(arguments: argparse.Namespace) -> int:
    report = check(
        arguments.model,
        external_data_dir=arguments.external_data_dir,
        follow_links=arguments.follow_links,
        verify_checksums=arguments.verify_checksums,
    )
    print(report.to_json() if arguments.json else report)
    return 0 if report.ok else 1


def _run(arguments: argparse.Namespace) -> int:
    dims = {name: _count(name, value) for name, value in _pairs("--dim", arguments.dim)}
    model = convert(arguments.model, dim_overrides=dims)
    feeds = _files(arguments.input, {v.name: v for v in model.inputs} | dict(model.optional))
    absent = [v for v in model.inputs if v.name not in feeds]
    if absent and not arguments.random:
        raise CommandError(f"input {absent[0]} is not given: --input {absent[0].name}=FILE.npy, or --random")
    rng = np.random.default_rng(arguments.seed)
    feeds |= {v.name: _random(v, rng) for v in absent}
    outputs = dict(zip((v.name for v in model.outputs), model.run(None, feeds), strict=True))
    for title, values in (("inputs", feeds), ("outputs", outputs)):
        print_table(title, ("name", "type", "values"), [(n, _type_of(x), _summary(x)) for n, x in values.items()])
    _save(outputs, arguments.output_dir, arguments.output_file)
    return 0


def _pairs(option: str, values: Iterable[str]) -> Iterable[tuple[str, str]]:
    for text in values:
        name, equals, value = text.rpartition("=")
        if not (name and equals and value):
            raise CommandError(f"{option} {text}: expected NAME=VALUE")
        yield name, value


def _count(name: str, value: str) -> int:
    if not value.isdecimal():
        raise CommandError(f"--dim {name}={value}: {value!r} is not a whole number")
    return int(value)


def _files(options: Iterable[str], declared: dict[str, ValueInfo]) -> dict[str, Any]:
    """The arrays of ``NAME=FILE.npy`` and ``FILE.npz`` options."""
    feeds: dict[str, Any] = {}
    for option in options:
        if "=" not in option and option.endswith(".npz"):
            with _load(option) as arrays:
                feeds |= {name: arrays[name] for name in arrays.files}
        else:
            ((name, path),) = _pairs("--input", [option])
            feeds[name] = _load(path)
    unknown = [name for name in feeds if name not in declared]
    if unknown:
        raise CommandError(f"the model has no input {unknown[0]!r}; it has {', '.join(map(repr, declared)) or 'none'}")
    return {name: _as_declared(array, declared[name]) for name, array in feeds.items()}


def _load(path: str) -> Any:
    try:
        return np.load(path, allow_pickle=False)
    except ValueError as error:
        raise CommandError(f"{path} is no .npy or .npz file that can be read: {error}") from None


def _as_declared(array: np.ndarray, info: ValueInfo) -> np.ndarray:
    """Undo what .npy files do to types NumPy does not know: text is fixed-width there, bfloat16 raw bytes."""
    if array.dtype.kind == "U":
        return array.astype(object)
    if array.dtype.kind == "V" and isinstance(info.type, TensorType):
        return array.view(info.type.dtype)
    return array


def _random(info: ValueInfo, rng: np.random.Generator) -> np.ndarray:
    try:
        return random_value(info, rng)
    except InputTypeError as e:
        raise CommandError(f"{e}; give it with --input {info.name}=FILE.npy") from None


def _type_of(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return str(TensorType(value.dtype, value.shape))
    return f"{type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else type(value).__name__


def _summary(value: Any) -> str:
    if not isinstance(value, np.ndarray) or not value.size or value.dtype == object or value.dtype.kind == "c":
        text = str(value.ravel()[:4].tolist() if isinstance(value, np.ndarray) else value)
        return text if len(text) <= 60 else text[:57] + "..."
    numbers = value.astype(np.float64)
    finite = numbers[np.isfinite(numbers)]
    parts = [
        f"{what} {f(finite):.6g}" for what, f in (("min", np.min), ("mean", np.mean), ("max", np.max)) if finite.size
    ]
    odd = [f"{n} {what}" for what, n in (("nan", np.isnan(numbers).sum()), ("inf", np.isinf(numbers).sum())) if n]
    return "  ".join(parts + odd)


def _save(outputs: dict[str, Any], folder: Path | None, file: Path | None) -> None:
    arrays = {name: _storable(value) for name, value in outputs.items() if isinstance(value, np.ndarray)}
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in arrays.items():
            # An output may be called a/b:0; quoted, it is a file name on every system, and still unique.
            np.save(folder / f"{quote(name, safe='')}.npy", array)
    if file is not None:
        # What np.savez writes; but that takes names as keywords, and an output may be called "file".
        with zipfile.ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                    np.lib.format.write_array(stream, array, allow_pickle=False)
    left_out = [name for name in outputs if name not in arrays]
    if left_out and (folder or file):
        print(f"not saved, being no tensors: {', '.join(left_out)}", file=sys.stderr)


def _storable(array: np.ndarray) -> np.ndarray:
    return array.astype(np.str_) if array.dtype == object else array


def _inspect(arguments: argparse.Namespace) -> int:
    imported = open_model(arguments.model, {}).model()
    facts = describe(imported)
    if arguments.json:
        print(json.dumps(facts, indent=2))
    else:
        _print_facts(facts, everything=arguments.all)
    return 3 if any(not o["supported"] for o in facts["operators"]) else 0


def describe(imported: Imported) -> dict[str, Any]:
    """What ``inspect`` shows, as plain data: everything JSON can hold."""
    model = Model(imported)
    counts: Counter[tuple[str, str, int, bool, bool]] = Counter()
    for graph in imported.graph.walk():
        for node in graph.nodes:
            is_function = isinstance(node.target, Function)
            counts[node.domain, node.op_type, node.opset, is_function, node.target is not None] += 1
    return {
        "ir_version": imported.ir_version,
        "opsets": {domain or "ai.onnx": version for domain, version in imported.opsets.items()},
        "metadata": dict(imported.metadata),
        "inputs": [_described(v) for v in model.inputs],
        "optional_inputs": [_described(v) for v in model.optional.values()],
        "outputs": [_described(v) for v in model.outputs],
        "parameters": [
            {"name": name, "type": _type_of(array), "bytes": int(array.nbytes)}
            for name, array in analysis.parameters(imported.graph).items()
        ],
        "operators": [
            {
                "domain": domain or "ai.onnx",
                "name": name,
                "opset": opset,
                "count": count,
                "supported": served,
                "function": is_function,
            }
            for (domain, name, opset, is_function, served), count in sorted(counts.items())
        ],
    }


def _described(info: ValueInfo) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": info.name, "type": str(info.type or "undeclared")}
    if info.shape is not None:
        facts["shape"] = list(info.shape)
    return facts


def _print_facts(facts: dict[str, Any], everything: bool) -> None:
    opsets = ", ".join(f"{domain} {version}" for domain, version in facts["opsets"].items())
    print(f"IR {facts['ir_version']}, opsets: {opsets}")
    if facts["metadata"]:
        print_table("metadata", ("name", "value"), facts["metadata"].items())
    for part in ("inputs", "optional_inputs", "outputs"):
        if facts[part]:
            print_table(part.replace("_", " "), ("name", "type"), [(v["name"], v["type"]) for v in facts[part]])
    parameters = sorted(facts["parameters"], key=lambda p: -p["bytes"])
    shown = parameters if everything else parameters[:SHOWN]
    total = sum(p["bytes"] for p in parameters)
    print_table(
        f"parameters: {len(parameters)}, {_size(total)}"
        + (f"; the {SHOWN} largest" if len(shown) < len(parameters) else ""),
        ("name", "type", "size"),
        [(p["name"], p["type"], _size(p["bytes"])) for p in shown],
    )
    missing = sum(not o["supported"] for o in facts["operators"])
    print_table(
        f"operators: {len(facts['operators'])}, {f'{missing} missing' if missing else 'none missing'}",
        ("domain", "operator", "opset", "count", ""),
        [
            (o["domain"], o["name"], str(o["opset"]), str(o["count"]), _remark(o))
            for o in sorted(facts["operators"], key=lambda o: (o["supported"], -o["count"]))
        ],
    )


def _remark(operator: dict[str, Any]) -> str:
    if not operator["supported"]:
        return "missing"
    return "function of the model" if operator["function"] else ""


def _size(n: float) -> str:
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB"
