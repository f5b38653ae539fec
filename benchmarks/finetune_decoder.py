"""Trains adapters of a 4-bit decoder, compared with the same weights in float32 and with PyTorch and peft.

    python -m benchmarks.finetune_decoder [--size tiny|125m] [--steps 50] [--rank 8] [--torch PYTHON]

The decoder is that of benchmarks/decoders.py, with random weights. All three start from the same adapters, with the
same batches and Adam steps. It fails if a loss in 4 bits, or PyTorch's, differs by more than 2 % from
ours in float32, or a bit of the packed weights has changed. PYTHON is an interpreter with torch, transformers and
peft, by default this one; without them PyTorch is skipped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import optax

import onnx2jax
from benchmarks.decoders import SIZES, Size, write

RATE: Final = 1e-3
CLOSE: Final = 0.02
ROWS, TOKENS, BATCHES = 4, 64, 8

TORCH: Final = """
import json, sys, time
import numpy as np, torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

options = json.loads(sys.argv[2])
given = np.load(sys.argv[1])
config = LlamaConfig(
    vocab_size=options["vocabulary"], hidden_size=options["hidden"], intermediate_size=options["inner"],
    num_hidden_layers=options["layers"], num_attention_heads=options["heads"], num_key_value_heads=options["kv_heads"],
    rms_norm_eps=1e-5, max_position_embeddings=2048, tie_word_embeddings=False,
)
model = LlamaForCausalLM(config)
state = {n[5:]: torch.from_numpy(given[n].copy()) for n in given.files if n.startswith("base ")}
model.load_state_dict(model.state_dict() | state)
kinds = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
settings = LoraConfig(r=options["rank"], lora_alpha=options["rank"], lora_dropout=0.0, target_modules=kinds)
model = get_peft_model(model, settings)
adapters = dict(model.named_parameters())
with torch.no_grad():
    for name in (n for n in given.files if n.startswith("lora ")):
        for full, value in adapters.items():
            if name[5:] in full:
                value.copy_(torch.from_numpy(given[name].copy()))
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], options["rate"])
losses, seconds = [], []
for step in range(options["steps"]):
    ids = torch.from_numpy(given["batches"][step % len(given["batches"])])
    start = time.perf_counter()
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    seconds.append(time.perf_counter() - start)
    losses.append(float(loss.detach()))
print(json.dumps({"losses": losses, "seconds": float(np.median(seconds))}))
"""


def batches(vocabulary: int) -> np.ndarray:
    """int64[batches, rows, tokens]: arithmetic sequences with steps of 1 to 5 among the first 200 tokens."""
    rng = np.random.default_rng(1)
    start, step = rng.integers(0, 200, (BATCHES, ROWS, 1)), rng.integers(1, 6, (BATCHES, ROWS, 1))
    return (start + step * np.arange(TOKENS)) % min(200, vocabulary)


def trained(
    model: onnx2jax.Model, rank: int, steps: int, data: np.ndarray
) -> tuple[dict[str, Any], list[float], float]:
    """The initial adapters, the losses, and the median seconds of a step; checks that packed weights are unchanged."""
    tuned = onnx2jax.finetune(model, "next_token", optax.adam(RATE), lora={"*_proj*": rank})
    state = tuned.init(0)
    first = {n: np.array(v) for n, v in state.params.items()}
    losses, seconds = [], []
    for step in range(steps):
        start = time.perf_counter()
        state, metrics = tuned.step(state, {"input_ids": data[step % len(data)]})
        losses.append(float(metrics["loss"]))
        seconds.append(time.perf_counter() - start)
    assert all("lora_" in n for n in state.params), "more than adapters has learnt"
    learnt = tuned.to_model(state).params
    changed = [n for n, v in model.params.items() if v.dtype == np.uint8 and learnt[n].tobytes() != v.tobytes()]
    assert not changed, f"packed weights have changed: {changed}"
    return first, losses, float(np.median(seconds))


def in_torch(
    python: str, floating: onnx2jax.Model, first: dict[str, Any], size: Size, rank: int, steps: int, data: np.ndarray
) -> tuple[list[float], float] | None:
    """The losses and seconds of PyTorch, from the same weights and adapters; None if a package is missing."""
    given: dict[str, Any] = {"batches": data}
    given |= {f"base {_module(n)}.weight": v.T for n, v in floating.params.items() if n.endswith("_proj_Q4")}
    given["base model.embed_tokens.weight"] = floating.params["embedding"]
    given["base lm_head.weight"] = floating.params["lm_head_Q4"].T
    given |= {f"lora {_module(n)}.lora_{n[-1]}.": v.T for n, v in first.items()}
    facts = {n: getattr(size, n) for n in ("vocabulary", "hidden", "inner", "layers", "heads", "kv_heads")}
    facts |= {"rank": rank, "steps": steps, "rate": RATE}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "given.npz"
        np.savez(path, allow_pickle=False, **{n: np.ascontiguousarray(v) for n, v in given.items()})
        done = subprocess.run([python, "-c", TORCH, str(path), json.dumps(facts)], capture_output=True, text=True)
    if done.returncode:
        if "ModuleNotFoundError" in done.stderr:
            print(f"PyTorch is left out: {done.stderr.strip().splitlines()[-1]}")
            return None
        raise RuntimeError(done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    return found["losses"], found["seconds"]


def _module(name: str) -> str:
    """The name in transformers of the linear layer whose weight has this name."""
    *rest, kind = name.split("_proj")[0].split(".")
    return ".".join([*rest, "self_attn" if kind in "qkvo" else "mlp", f"{kind}_proj"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON")
    arguments = parser.parse_args()
    size, rank, steps = SIZES[arguments.size], arguments.rank, arguments.steps
    data = batches(size.vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), size, 4)
        file = Path(folder) / "model.onnx"
        packed, floating = onnx2jax.convert(file), onnx2jax.convert(file, weights="float32")
        _, ours, seconds = trained(packed, rank, steps, data)
        first, wanted, float_seconds = trained(floating, rank, steps, data)
        rows = {"in 4 bits": (ours, seconds), "in float32": (wanted, float_seconds)}
        theirs = in_torch(arguments.torch, floating, first, size, rank, steps, data)
    if theirs is not None:
        rows["PyTorch, float32"] = theirs
    for name, (losses, time_of_step) in rows.items():
        off = np.abs(np.array(losses) / np.array(wanted) - 1).max()
        print(
            f"{name:18} loss {losses[0]:.4f} -> {losses[-1]:.4f}, off by {off:.2e} of float32 at most; "
            f"{time_of_step * 1e3:.0f} ms a step"
        )
        assert off <= CLOSE, f"{name} is off by {off:.1%}"


if __name__ == "__main__":
    main()
