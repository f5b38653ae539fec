"""``onnx2jax cache``: the folder of compiled programs, what is in it, and its deletion."""

from __future__ import annotations

import argparse
from typing import Any

from ..runtime import cache_folder
from .terminal import add_command, print_json


def add(commands: Any) -> None:
    """Add the command to a parser's."""
    shows = add_command(
        commands,
        "cache",
        _cache,
        "show the folder of compiled programs, or clear it",
        example="cache --clear",
    )
    shows.add_argument("--clear", action="store_true", help="delete all programs in it")


def _cache(arguments: argparse.Namespace) -> int:
    folder = cache_folder.folder(True)
    found = cache_folder.Contents([], [])
    if folder is not None:
        found = cache_folder.clear(folder) if arguments.clear else cache_folder.contents(folder)
    if arguments.json:
        facts = {"programs": len(found.entries), "bytes": found.bytes, "cleared": arguments.clear}
        print_json({"folder": None if folder is None else str(folder), **facts})
    elif folder is None:
        print(f"no folder: {cache_folder.VARIABLE} is empty, or the user has no home")
    else:
        end = ", now deleted" if arguments.clear else f" of at most {cache_folder.MAX_BYTES:,}"
        print(f"{folder}\n{len(found.entries)} programs, {found.bytes:,} bytes{end}")
    return 0
