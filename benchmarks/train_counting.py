"""Train the demo decoder: a transformer of two layers that counts in English, letter by letter.

Writes ``onnx2jax/data/counting``: the model (opset 21, checked) in the format of onnxruntime-genai's builder for large
models, GroupQueryAttention with KV caches and rotary embedding, and its tokenizer. A token is a letter's ASCII code.
Seeded; a few minutes on one core:

    python benchmarks/train_counting.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import optax
from onnx import TensorProto, helper, numpy_helper

import onnx2jax

SEED: Final = 0
STEPS: Final = 1500
BATCH: Final = 16
TOKENS: Final = 256
"""Letters of a training text."""
CONTEXT: Final = 256
"""The maximum length of a text: rows of the rotary embedding tables."""
LAYERS: Final = 2
HIDDEN: Final = 48
HEADS: Final = 4
KV_HEADS: Final = 2
SIZE: Final = 16
INNER: Final = 64
LETTERS: Final = 128
FILE: Final = Path(__file__).resolve().parent.parent / "onnx2jax" / "data" / "counting" / "model.onnx"

ONES: Final = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
TENS: Final = "twenty thirty forty fifty sixty seventy eighty ninety"


def word(number: int) -> str:
    """A number below a hundred, in English.

    >>> word(21), word(40)
    ('twenty-one', 'forty')
    """
    if number < 20:
        return ONES.split()[number]
    tens, ones = divmod(number, 10)
    return TENS.split()[tens - 2] + (f"-{word(ones)}" if ones else "")


def counted(start: int, letters: int) -> str:
    """A text of some length that counts from a number; after ninety-nine it continues at zero."""
    text = ""
    while len(text) < letters:
        text += f"{word(start % 100)} "
        start += 1
    return text[:letters]


def texts(rng: np.random.Generator) -> np.ndarray:
    """A batch of texts as tokens, [BATCH, TOKENS]."""
    starts = rng.integers(0, 100, BATCH)
    return np.array([[ord(c) for c in counted(int(s), TOKENS)] for s in starts])


class Network:
    """A builder of the decoder's graph, with random weights."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(SEED)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}

    def add(self, op_type: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op_type, inputs, [output], name=output, **attributes))
        return output

    def constant(self, name: str, value: Any) -> str:
        self.weights[name] = np.asarray(value)
        return name

    def linear(self, x: str, name: str, rows: int, columns: int) -> str:
        weight = self.rng.normal(size=(rows, columns)) / np.sqrt(rows)
        return self.add("MatMul", [x, self.constant(f"{name}.weight", weight.astype(np.float32))], name)

    def norm(self, x: str, name: str) -> str:
        gain = self.constant(f"{name}.weight", np.ones(HIDDEN, np.float32))
        return self.add("LayerNormalization", [x, gain], name, axis=-1, epsilon=1e-5)

    def lengths(self, mask: str) -> list[str]:
        """GroupQueryAttention's inputs seqlens_k and total_sequence_length, from attention_mask."""
        one, axes = self.constant("one", np.int64(1)), self.constant("axes", np.array([1]))
        counts = self.add("ReduceSum", [mask, axes], "lengths/counts", keepdims=0)
        last = self.add("Cast", [self.add("Sub", [counts, one], "lengths/last")], "lengths/seqlens_k", to=6)
        total = self.add("Squeeze", [self.add("Shape", [mask], "lengths/shape", start=1)], "lengths/total")
        tables = [self.constant(f"{n}_cache", t) for n, t in zip(("cos", "sin"), rotations(), strict=True)]
        return [last, self.add("Cast", [total], "lengths/total_sequence_length", to=6), *tables]

    def layer(self, i: int, x: str, lengths: list[str]) -> str:
        at = f"layers.{i}"
        h = self.norm(x, f"{at}.norm")
        sizes = (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        qkv = [self.linear(h, f"{at}.{n}", HIDDEN, SIZE * count) for n, count in sizes]
        past = [f"past_key_values.{i}.key", f"past_key_values.{i}.value"]
        outputs = [f"{at}.attention", f"present.{i}.key", f"present.{i}.value"]
        self.nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                [*qkv, *past, *lengths],
                outputs,
                name=outputs[0],
                domain="com.microsoft",
                num_heads=HEADS,
                kv_num_heads=KV_HEADS,
                do_rotary=1,
            )
        )
        x = self.add("Add", [x, self.linear(outputs[0], f"{at}.o", HEADS * SIZE, HIDDEN)], f"{at}.attended")
        h = self.add("Relu", [self.linear(self.norm(x, f"{at}.norm2"), f"{at}.up", HIDDEN, INNER)], f"{at}.relu")
        return self.add("Add", [x, self.linear(h, f"{at}.down", INNER, HIDDEN)], f"{at}.out")


def rotations() -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines, [CONTEXT, SIZE / 2]."""
    angles = np.arange(CONTEXT)[:, None] / 100 ** (np.arange(SIZE // 2) / (SIZE // 2))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def network() -> onnx.ModelProto:
    """The decoder with random weights."""
    net = Network()
    table = net.constant("embedding.weight", (net.rng.normal(size=(LETTERS, HIDDEN)) * 0.5).astype(np.float32))
    lengths = net.lengths("attention_mask")
    x = net.add("Gather", [table, "input_ids"], "embedding")
    for i in range(LAYERS):
        x = net.layer(i, x, lengths)
    net.add("MatMul", [net.norm(x, "norm"), net.add("Transpose", [table], "head", perm=[1, 0])], "logits")

    def value(name: str, kind: int, *shape: Any) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    names = [(i, part) for i in range(LAYERS) for part in ("key", "value")]
    real, whole = TensorProto.FLOAT, TensorProto.INT64
    graph = helper.make_graph(
        net.nodes,
        "counting",
        [
            value("input_ids", whole, "batch_size", "sequence_length"),
            value("attention_mask", whole, "batch_size", "total_sequence_length"),
            *(
                value(f"past_key_values.{i}.{p}", real, "batch_size", KV_HEADS, "past_sequence_length", SIZE)
                for i, p in names
            ),
        ],
        [
            value("logits", real, "batch_size", "sequence_length", LETTERS),
            *(value(f"present.{i}.{p}", real, "batch_size", KV_HEADS, "total_sequence_length", SIZE) for i, p in names),
        ],
        [numpy_helper.from_array(w, n) for n, w in net.weights.items()],
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
        producer_name="benchmarks/train_counting.py",
    )
    onnx.checker.check_model(model)
    return model


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json, whose tokens are ASCII codes, and a chat template that joins the messages."""
    codes = {chr(i): i for i in range(LETTERS)}
    model: dict[str, Any] = {"type": "BPE", "vocab": codes, "merges": [], "unk_token": "?"}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    facts: dict[str, Any] = {"version": "1.0", **parts, "added_tokens": [], "decoder": {"type": "Fuse"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(facts, separators=(",", ":")) + "\n")
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}) + "\n")


def main() -> None:
    schedule = optax.warmup_cosine_decay_schedule(0, 4e-3, 100, STEPS)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))
    model = onnx2jax.convert(network())
    tuned = onnx2jax.finetune(model, "next_token", optimizer)
    rng = np.random.default_rng(SEED)
    for state, metrics in tuned.fit({"input_ids": texts(rng)} for _ in range(STEPS)):
        if int(state.step) % 100 == 0:
            print(f"step {int(state.step)}: {float(metrics['loss']):.4f}", flush=True)
    trained = tuned.to_model(state)
    decoder = onnx2jax.decoder(trained)
    wanted = [counted(n, CONTEXT) for n in range(100)]
    begun = [text.index(" ") + 1 for text in wanted]
    right = []
    for text, count in zip(wanted, begun, strict=True):
        found = decoder.generate([ord(c) for c in text[:count]], CONTEXT - 16).texts()[0]
        right.append("".join(map(chr, found)) == text[count:][: len(found)])
    onnx2jax.save(trained, FILE)
    proto = onnx.load(FILE)
    facts = {
        "task": "counting in English, letter by letter, from any number below a hundred; a token is an ASCII code",
        "context_length": str(CONTEXT),
        "right": f"{sum(right)} of {len(right)} beginnings of one number, continued to {CONTEXT} letters",
    }
    helper.set_model_props(proto, facts)
    onnx.save(proto, FILE)
    write_tokenizer(FILE.parent)
    print(facts["right"], f"{FILE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
