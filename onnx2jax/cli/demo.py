"""``onnx2jax demo`` and ``cache``: the bundled model, and the folder of compiled programs."""

from __future__ import annotations

from pathlib import Path

from .. import demo
from ..runtime import cache_folder
from .parser import Arguments, Parser, as_path
from .terminal import print_result


def add_demo(parser: Parser) -> None:
    """Add the options of the command."""
    parser.describe(
        "demo --output demo.png",
        statuses={1: "matplotlib or rich is not installed"},
        json="print the numbers as JSON and draw nothing; needs no extras",
        model=None,
    )
    parser.add_argument("--output", type=as_path, default=Path("demo.png"), help="the picture (default: %(default)s)")


def do_demo(arguments: Arguments) -> int:
    if not arguments.json:
        return demo.run(arguments.output)
    findings = demo.compute()
    facts = {
        "labels": findings.samples.labels.tolist(),
        "predictions": findings.predictions.tolist(),
        "right": findings.right,
        "seconds": findings.timings._asdict(),
    }
    figures = ("reference_difference", "vmap_difference", "gradient", "finite_difference")
    print_result(arguments, facts | {n: getattr(findings, n) for n in figures})
    return 0


def add_cache(parser: Parser) -> None:
    """Add the options of the command."""
    parser.describe("cache --clear", model=None)
    parser.add_switch("--clear", "delete all programs in it")


def do_cache(arguments: Arguments) -> None:
    folder, contents = cache_folder.folder(True), cache_folder.Contents([], [])
    if folder is None:
        text = f"no folder: {cache_folder.VARIABLE} is empty, or the user has no home"
    else:
        contents = cache_folder.clear(folder) if arguments.clear else cache_folder.contents(folder)
        end = ", now deleted" if arguments.clear else f" of at most {cache_folder.MAX_BYTES:,}"
        text = f"{folder}\n{len(contents.entries)} programs, {contents.bytes:,} bytes{end}"
    facts = {"programs": len(contents.entries), "bytes": contents.bytes, "cleared": arguments.clear}
    print_result(arguments, {"folder": folder and str(folder), **facts}, text)
