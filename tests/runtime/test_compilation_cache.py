"""JAX's persistent compilation cache works for models: another process does not compile again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.helpers import ROOT

CHILD = """
import collections
import jax, numpy as np, onnx2jax
from onnx import parser

events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **_: events.update([name.rpartition("/")[2]]))
model, images = onnx2jax.convert(onnx2jax.demo_model()), np.ones((4, 1, 8, 8), np.float32)
(ran,) = model.run(None, {"image": images})  # which would load the program a second time, on a client of its own
np.testing.assert_allclose(ran, model(images), rtol=1e-5)
staged = parser.parse_model('''<ir_version: 10, opset_import: ["": 21]>
    g (float[n, n] x) => (float[m, k] y) { p = MatMul(x, x)  i = NonZero(p)  j = Cast <to = 1> (i)
    t = Transpose(j)  y = MatMul(j, t) }''')
onnx2jax.convert(staged)(np.eye(3, dtype=np.float32))
print(events["cache_hits"], events["cache_misses"])
"""


def test_another_process_hits_the_persistent_cache(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    counts = []
    for seed in "12":  # changes the order of sets
        command = [sys.executable, "-c", CHILD]
        done = subprocess.run(
            command, env={**environment, "PYTHONHASHSEED": seed}, cwd=ROOT, check=True, capture_output=True, text=True
        )
        counts.append([int(n) for n in done.stdout.split()])
    (hits, misses), again = counts
    assert hits == 0 and misses >= 2  # the demo's program and the product before NonZero
    assert again == [misses, 0]
