"""Generation compared with onnxruntime-genai and onnxruntime: tokens/s, time to the first token, and memory.

    python -m benchmarks.decoders [--size tiny|125m] [--batch 1 8] [--tokens 64] [--weights float32 int4] [--memory]

The decoders have random weights, in the format of onnxruntime-genai's builder for llama; the tokens of all rivals are
first checked to be equal. onnxruntime-genai is used if it is installed; otherwise a loop by hand around onnxruntime,
with growing caches. ``--memory`` measures the memory of a separate process, compared with the size of the file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import onnx2jax
from benchmarks.harness import compare

MS: Final = "com.microsoft"
PROMPT: Final = 32


@dataclass(frozen=True)
class Size:
    """The size of a decoder: vocabulary, layers, width, heads, key-value heads, feed-forward width."""

    vocabulary: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int

    @property
    def head(self) -> int:
        return self.hidden // self.heads


SIZES: Final = {
    "tiny": Size(512, 2, 128, 4, 2, 256),
    "125m": Size(32000, 12, 768, 12, 4, 2688),
    "1.1b": Size(32000, 22, 2048, 32, 4, 5632),
}


class Writer:
    """A graph builder."""

    def __init__(self, size: Size, bits: int) -> None:
        self.size, self.bits = size, bits
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self.rng = np.random.default_rng(0)

    def node(self, op_type: str, *inputs: str, out: str = "", domain: str = "", **attributes: Any) -> str:
        name = out or f"{op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], name=name, domain=domain, **attributes))
        return name

    def keep(self, name: str, array: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def drawn(self, rows: int, columns: int, scale: float) -> np.ndarray:
        return (self.rng.standard_normal((rows, columns)) * scale).astype(np.float32)

    def weight(self, name: str, rows: int, columns: int, scale: float) -> str:
        return self.keep(name, self.drawn(rows, columns, scale))

    def linear(self, x: str, name: str, rows: int, columns: int) -> str:
        if not self.bits:
            return self.node("MatMul", x, self.weight(name, rows, columns, rows**-0.5), out=f"{name}/MatMul")
        weight = self.drawn(rows, columns, rows**-0.5)
        blocks = weight.T.reshape(columns, -1, 32)
        scales = np.abs(blocks).max(-1) / 7
        q = np.clip(np.round(blocks / scales[..., None]) + 8, 0, 15).astype(np.uint8)
        operands = self.keep(f"{name}_Q4", q[..., ::2] | q[..., 1::2] << 4), self.keep(f"{name}_scales", scales)
        return self.node(
            "MatMulNBits", x, *operands, out=f"{name}/MatMul", domain=MS, K=rows, N=columns, bits=4, block_size=32
        )

    def norm(self, x: str, name: str) -> str:
        scale = self.keep(name, np.ones(self.size.hidden, np.float32))
        return self.node("SimplifiedLayerNormalization", x, scale, axis=-1, epsilon=1e-5)

    def layer(self, x: str, i: int) -> str:
        s = self.size
        h, name = self.norm(x, f"{i}.norm"), f"model.layers.{i}"
        q = self.linear(h, f"{name}.q_proj", s.hidden, s.heads * s.head)
        k, v = (self.linear(h, f"{name}.{n}_proj", s.hidden, s.kv_heads * s.head) for n in "kv")
        past = [f"past_key_values.{i}.{part}" for part in ("key", "value")]
        present = [f"present.{i}.{part}" for part in ("key", "value")]
        self.nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                [q, k, v, *past, "lengths", "total", "cos_cache", "sin_cache"],
                [f"{name}.attention", *present],
                domain=MS,
                num_heads=s.heads,
                kv_num_heads=s.kv_heads,
                do_rotary=1,
            )
        )
        x = self.node("Add", x, self.linear(f"{name}.attention", f"{name}.o_proj", s.heads * s.head, s.hidden))
        h = self.norm(x, f"{i}.norm2")
        gate, up = (self.linear(h, f"{name}.{n}_proj", s.hidden, s.inner) for n in ("gate", "up"))
        h = self.node("Mul", self.node("Mul", gate, self.node("Sigmoid", gate)), up)
        return self.node("Add", x, self.linear(h, f"{name}.down_proj", s.inner, s.hidden))

    def model(self) -> onnx.ModelProto:
        s, tensor = self.size, helper.make_tensor_value_info
        angles = np.arange(2048)[:, None] / 10000 ** (np.arange(s.head // 2) / (s.head // 2))
        self.keep("cos_cache", np.cos(angles).astype(np.float32))
        self.keep("sin_cache", np.sin(angles).astype(np.float32))
        self.keep("one", np.array([1])), self.keep("first", np.array(1))
        ones = self.node("ReduceSum", "attention_mask", "one", keepdims=0)
        self.node("Cast", self.node("Sub", ones, "one"), out="lengths", to=TensorProto.INT32)
        extent = self.node("Gather", self.node("Shape", "attention_mask"), "first")
        self.node("Cast", extent, out="total", to=TensorProto.INT32)
        table = self.weight("embedding", s.vocabulary, s.hidden, 0.5)
        x = self.node("Gather", table, "input_ids")
        for i in range(s.layers):
            x = self.layer(x, i)
        self.node("Identity", self.linear(self.norm(x, "norm"), "lm_head", s.hidden, s.vocabulary), out="logits")
        whole = ["batch_size", "total_sequence_length"]
        inputs = [
            tensor("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"]),
            tensor("attention_mask", TensorProto.INT64, whole),
        ]
        outputs = [tensor("logits", TensorProto.FLOAT, ["batch_size", "sequence_length", s.vocabulary])]
        for i in range(s.layers):
            for part in ("key", "value"):
                ends = s.kv_heads, s.head
                past: list[Any] = ["batch_size", ends[0], "past_sequence_length", ends[1]]
                after: list[Any] = ["batch_size", ends[0], "total_sequence_length", ends[1]]
                inputs.append(tensor(f"past_key_values.{i}.{part}", TensorProto.FLOAT, past))
                outputs.append(tensor(f"present.{i}.{part}", TensorProto.FLOAT, after))
        graph = helper.make_graph(self.nodes, "decoder", inputs, outputs, self.weights)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MS, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def write(folder: Path, size: Size, bits: int) -> None:
    """A decoder's folder: model.onnx, its data, and genai_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save_model(
        Writer(size, bits).model(), folder / "model.onnx", save_as_external_data=True, location="model.onnx.data"
    )
    names = {"past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"}
    decoder = {
        "session_options": {"provider_options": []},
        "filename": "model.onnx",
        "head_size": size.head,
        "hidden_size": size.hidden,
        "num_attention_heads": size.heads,
        "num_hidden_layers": size.layers,
        "num_key_value_heads": size.kv_heads,
        "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask", **names},
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
    model: dict[str, Any]
    model = {
        "bos_token_id": 1,
        "eos_token_id": size.vocabulary - 1,
        "pad_token_id": 0,
        "context_length": 2048,
    }
    model |= {"decoder": decoder, "type": "llama", "vocab_size": size.vocabulary}
    search = {"do_sample": False, "max_length": 2048, "past_present_share_buffer": True, "num_beams": 1}
    (folder / "genai_config.json").write_text(json.dumps({"model": model, "search": search}))


class Genai:
    """onnxruntime-genai's own loop."""

    def __init__(self, folder: Path) -> None:
        import onnxruntime_genai

        self._genai, self._model = onnxruntime_genai, onnxruntime_genai.Model(str(folder))

    def __call__(self, prompts: np.ndarray, count: int) -> np.ndarray:
        batch, size = prompts.shape
        options = self._genai.GeneratorParams(self._model)
        options.set_search_options(
            max_length=size + count, min_length=size + count, batch_size=batch, do_sample=False, num_beams=1
        )
        generator = self._genai.Generator(self._model, options)
        generator.append_tokens(prompts.astype(np.int32).reshape(-1) if batch == 1 else prompts.astype(np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        return np.stack([generator.get_sequence(i)[size:] for i in range(batch)])


class ByHand:
    """A loop around onnxruntime's session, with growing caches."""

    def __init__(self, folder: Path) -> None:
        import onnxruntime

        self._session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])

    def __call__(self, prompts: np.ndarray, count: int) -> np.ndarray:
        batch, ids, texts = len(prompts), prompts, []
        caches = [i for i in self._session.get_inputs() if i.name.startswith("past")]
        past = {i.name: np.zeros((batch, i.shape[1], 0, i.shape[3]), np.float32) for i in caches}
        for step in range(count):
            mask = np.ones((batch, prompts.shape[1] + step), np.int64)
            logits, *present = self._session.run(None, {"input_ids": ids, "attention_mask": mask, **past})
            ids = logits[:, -1:].argmax(-1)
            texts.append(ids)
            past = dict(zip(past, present, strict=True))
        return np.concatenate(texts, axis=1)


def rival(folder: Path) -> tuple[str, Any]:
    """onnxruntime-genai if it is installed, otherwise the loop by hand."""
    try:
        return "onnxruntime-genai", Genai(folder)
    except ImportError:
        return "onnxruntime by hand", ByHand(folder)


def measure(folder: Path, batch: int, count: int, vocabulary: int) -> None:
    """Print a row of the table."""
    prompts = np.random.default_rng(1).integers(2, vocabulary - 1, (batch, PROMPT))
    name, other = rival(folder)
    start = time.perf_counter()
    decoder = onnx2jax.decoder(folder)
    ours = decoder.generate(prompts, count, stop=()).tokens
    ready = time.perf_counter() - start
    theirs = other(prompts, count)
    same = int((np.cumprod(ours == theirs, axis=1)).sum())
    timings = compare(
        {
            "ours": lambda: decoder.generate(prompts, count, stop=()).tokens,
            "first": lambda: decoder.generate(prompts, 1, stop=(), length=PROMPT + count).tokens,
            name: lambda: other(prompts, count),
        }
    ).timings
    own, their = timings["ours"].median, timings[name].median
    steps = (own - timings["first"].median) / (count - 1)
    print(
        f"{folder.name:16} batch {batch}: {batch * count / own:7.1f} tokens/s, {name} {batch * count / their:7.1f}, "
        f"ratio {their / own:.2f}; a step {steps * 1e3:.2f} ms, the first {timings['first'].median * 1e3:.1f} ms; "
        f"{same} of {ours.size} tokens the same; ready in {ready:.1f} s, {decoder.compilations} programs",
        flush=True,
    )


MEMORY: Final = """
import sys, pathlib, jax, numpy as np, onnx2jax
jax.jit(lambda x: x + 1)(np.ones(3)).block_until_ready()
def anonymous():
    text = pathlib.Path("/proc/self/status").read_text()
    return {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines() if line.startswith(("Rss", "VmH"))}
before = anonymous()
decoder = onnx2jax.decoder(sys.argv[1], cache_dir=sys.argv[2] if len(sys.argv) > 2 else None)
decoder.generate(np.arange(2, 34), 16, stop=())
after = anonymous()
print(after["RssAnon"] - before["RssAnon"], after["VmHWM"] - before["VmHWM"])
"""


def memory(folder: Path) -> None:
    """Print a process's memory for a decoder and the size of its file; then with cached programs."""
    file = (folder / "model.onnx.data").stat().st_size / 1e6
    cache = str(folder / "programs")
    for what, more in (("compiled", []), ("and kept", [cache]), ("found in cache_dir", [cache])):
        command = [sys.executable, "-c", MEMORY, str(folder), *more]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        kept, peak = (int(n) * 1024 / 1e6 for n in done.stdout.split())
        print(
            f"{folder.name:16} file {file:.0f} MB; programs {what}: kept {kept:.0f} MB ({kept / file:.2f} x), peak "
            f"{peak:.0f} MB ({peak / file:.2f} x)",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--weights", nargs="+", choices=("float32", "int4"), default=("float32", "int4"))
    parser.add_argument("--memory", action="store_true")
    arguments = parser.parse_args()
    size = SIZES[arguments.size]
    with tempfile.TemporaryDirectory() as place:
        for weights in arguments.weights:
            folder = Path(place) / f"{arguments.size}-{weights}"
            write(folder, size, 4 if weights == "int4" else 0)
            if arguments.memory:
                memory(folder)
                continue
            for batch in arguments.batch:
                measure(folder, batch, arguments.tokens, size.vocabulary)


if __name__ == "__main__":
    main()
