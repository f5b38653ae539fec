"""``onnx2jax demo`` and ``cache``: the bundled model, and the folder of compiled programs."""

from __future__ import annotations

import argparse
from pathlib import Path

from .. import demo
from ..progress import stage
from ..runtime import cache_folder
from .terminal import add_command, as_path, print_json, print_result


def add_demo(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_command(
        parser,
        _demo,
        example="demo --output demo.png",
        statuses={1: "matplotlib or rich is not installed"},
        json="print the numbers as JSON and draw nothing; needs no extras",
        model=None,
    )
    parser.add_argument("--output", type=as_path, default=Path("demo.png"), help="the picture (default: %(default)s)")


def _demo(arguments: argparse.Namespace) -> int:
    sign = stage("converting, compiling and differentiating")
    if not arguments.json:
        return demo.run(arguments.output, sign)
    with sign:
        found = demo.compute()
    samples = found.samples
    print_json(
        {
            "labels": samples.labels.tolist(),
            "predictions": found.predictions.tolist(),
            "right": int((found.predictions == samples.labels).sum()),
            "seconds": found.timings._asdict(),
            "reference_difference": found.reference_difference,
            "vmap_difference": found.vmap_difference,
            "gradient": found.gradient,
            "finite_difference": found.finite_difference,
        }
    )
    return 0


def add_cache(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_command(parser, _cache, example="cache --clear", model=None)
    parser.add_argument("--clear", action="store_true", help="delete all programs in it")


def _cache(arguments: argparse.Namespace) -> int:
    folder = cache_folder.folder(True)
    found = cache_folder.Contents([], [])
    if folder is not None:
        found = cache_folder.clear(folder) if arguments.clear else cache_folder.contents(folder)
    facts = {"programs": len(found.entries), "bytes": found.bytes, "cleared": arguments.clear}
    end = ", now deleted" if arguments.clear else f" of at most {cache_folder.MAX_BYTES:,}"
    text = f"{folder}\n{len(found.entries)} programs, {found.bytes:,} bytes{end}"
    if folder is None:
        text = f"no folder: {cache_folder.VARIABLE} is empty, or the user has no home"
    return print_result(arguments, {"folder": folder and str(folder), **facts}, text)
