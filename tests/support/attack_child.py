"""Runs one attack at a time in a separate process, with little memory, and reports the files it opened.

Each line of standard input is a folder with m.onnx inside; each line of standard output the answer, as JSON. A child is
forked for each, so that all share one import of JAX.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import onnx2jax
from onnx2jax.errors import OnnxError

ALLOWED = 500 * 2**20
"""Bytes in addition to the imports' memory."""


def attempt(folder: Path, action: Any) -> str:
    try:
        action(folder / "m.onnx")
    except OnnxError as e:
        return type(e).__name__
    return "accepted"


def call(path: Path) -> None:
    m = onnx2jax.convert(path)
    if (path.parent / "call").exists():
        m.run(None, {})


def attack(folder: Path) -> dict[str, Any]:
    """The outcomes of check and convert, and of a call if the folder has inputs for one."""
    status = Path("/proc/self/status").read_text()
    data = 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    opened: list[str] = []
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    resource.setrlimit(resource.RLIMIT_DATA, (data + ALLOWED, data + ALLOWED))
    start = time.process_time()
    answer = {"check": "accepted" if onnx2jax.check(folder / "m.onnx").ok else "refused"}
    answer |= {"convert": attempt(folder, call), "seconds": time.process_time() - start}
    return answer | {
        "megabytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024,
        "opened": [name for name in opened if name.startswith(str(folder.parent))],
    }


def main() -> None:
    harmless = onnx2jax.demo_model()
    onnx2jax.check(harmless)  # the first calls import JAX, for seconds
    onnx2jax.convert(harmless)
    gc.freeze()  # else the child's garbage collector would copy all pages it visits
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
            try:
                answer = attack(Path(line.strip()))
            except BaseException:
                answer = {"died": traceback.format_exc()[-2000:]}
            print(json.dumps(answer), flush=True)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if status:
            print(json.dumps({"died": status}), flush=True)


if __name__ == "__main__":
    main()
