"""Programs of decoders stored in ``cache_dir``: the next process neither traces nor compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onnx2jax
from onnx2jax.generation.sampling import greedy
from onnx2jax.jaxpr import pipeline
from tests.support.helpers import ROOT
from tests.support.ledger import spent

SCRIPT = """
import sys, jax, onnx2jax
from onnx2jax.jaxpr import pipeline
decoder = onnx2jax.decoder(onnx2jax.demo_decoder(), cache_dir=sys.argv[1])
if sys.argv[2] == "again":
    pipeline.run = None
    jax.stages.Lowered.compile = None
texts = decoder.generate([list(b"one two "), list(b"nine ")], 12, rng=1)
beams = decoder.beam_search([list(b"one two "), list(b"nine ")], 12, beams=2)
print(texts.texts(), beams.tokens.tolist(), decoder.compilations)
"""


@pytest.mark.extended  # tests/runtime/test_program_cache.py shows the same of a model
def test_another_process_neither_traces_nor_compiles(tmp_path: Path) -> None:
    printed = []
    for seed, which in (("1", "first"), ("2", "again")):
        command = [sys.executable, "-c", SCRIPT, str(tmp_path), which]
        environment = {n: v for n, v in os.environ.items() if n != "XLA_FLAGS"} | {"PYTHONHASHSEED": seed}
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    assert printed[0] == printed[1]


@pytest.mark.usefixtures("one_cpu")
def test_stored_programs_do_not_depend_on_weights_but_on_users_functions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = onnx2jax.convert(onnx2jax.demo_decoder(), cache_dir=tmp_path)
    prompt = list(b"one two ")
    wanted = onnx2jax.decoder(model).generate(prompt, 4).texts()
    for sampling, texts in (
        (lambda logits, key: greedy(logits, key), wanted),
        (lambda logits, key: greedy(logits, key) * 0 + 98, [[98] * 4]),
    ):
        assert onnx2jax.decoder(model).generate(prompt, 4, sampling=sampling).texts() == texts

    def reject(*_: Any) -> Any:
        raise AssertionError("traced")

    monkeypatch.setattr(pipeline, "run", reject)
    table = model.params["embedding.weight"]  # tied: rolling its rows renumbers the tokens
    rolled = onnx2jax.decoder(model.with_params({"embedding.weight": np.roll(table, 1, axis=0)}))
    assert rolled.generate([t + 1 for t in prompt], 4).texts() == [[t + 1 for t in row] for row in wanted]


@pytest.mark.usefixtures("one_cpu")
def test_decoders_use_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As models do, where no folder is named."""
    monkeypatch.delenv("ONNX2JAX_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wanted = onnx2jax.decoder(onnx2jax.demo_decoder()).generate(list(b"one two "), 4).texts()
    before = spent().compilations
    assert onnx2jax.decoder(onnx2jax.demo_decoder()).generate(list(b"one two "), 4).texts() == wanted
    assert spent().compilations == before
    folder = tmp_path / "onnx2jax"
    assert list(folder.glob("*.program")) and folder.stat().st_mode & 0o777 == 0o700
