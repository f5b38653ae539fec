"""Write docs/figures.json, and into the pages the figures that they quote from it.

python -m docs.make_figures

A figure comes from docs/performance.json, docs/exporters.md, the registry, the tables of the tests, or
docs/measured.json, which holds what commands of their own measure. ``QUOTES`` says where pages quote it, by its name.
tests/face/test_figures.py fails where a page says otherwise, and on a figure that is quoted from nowhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

import onnx

import onnx2jax
from docs.make_conformance import rules
from tests.support.helpers import ROOT
from tests.support.official import BERNOULLI, COUNTS, DROPOUT
from tests.tables.official import FAILS, NOT_IN_JIT, STAGED

DOCS: Final = ROOT / "docs"
KEPT: Final = DOCS / "figures.json"
APART: Final = re.compile(r"<!-- measured: .+? -->\n+(?:.+\n)+")
"""A paragraph or table whose figures stand on this page alone, with the command that measures them."""

COLUMNS: Final = ("resnet50", "mobilenet_v2", "unet", "vit", "bert", "gpt2_step", "lstm")
"""Networks of the table in README.md that are there by hand, too."""
TABLE: Final = (
    "Time of onnxruntime {onnxruntime}, and of the same network by hand in JAX",
    "some {rows} rows",
    "| {files} real files, median |",
    "| onnxruntime | "
    + " | ".join(f"{{{n} / onnxruntime}}" for n in (*COLUMNS, "int8_qdq", "files"))
    + " | | JAX by hand | "
    + " | ".join(f"{{{n} / JAX by hand}}" for n in COLUMNS)
    + " | | |",
)
QUOTES: Final[Mapping[str, tuple[str, ...]]] = {
    "README.md": (
        *TABLE,
        "ONNX's official suite (onnx {onnx})",
        "{passing} of {cases} cases pass",
        "{by value} by value and {by distribution} by distribution",
        "{one program} are one program",
        "{in one jit} run",
        "{versions} of {versions}, in four domains; {microsoft} operators of com.microsoft",
        "proven by a test | {rules} of {rules} |",
        "| {exported}: {exported right} right in every column, {exported excused} limited by",
        "Of {accelerated} [programs so counted]",
        "moves {accelerated / by hand} times the bytes of the same network by hand in JAX.",
        "of the official suite's {cases},",
        "| onnx2jax | {passing} |",
        "A decoder of 125 million parameters generates {genai float32} times",
        "in float32 and {genai 4 bits} in 4 bits; with 8 prompts {genai float32, 8} and {genai 4 bits, 8}",
    ),
    "docs/index.md": (
        "{passing} of the {cases} cases",
        "each of {rules} [rules",
        "Of {exported} files that",
        "{exported right} are right in every column, {exported excused} are limited",
    ),
    "docs/limits.md": (
        "the median of {files} real files runs at {files / onnxruntime} of its speed",
        "files of int8 at {int8 least} to {int8 most}",
        "grow a process by {memory bert} times the weights and activations of BERT-base and {memory resnet50} times "
        "those of ResNet-50; onnxruntime's by {memory bert, onnxruntime} and {memory resnet50, onnxruntime}",
        "by {memory 4 bits} times its file of {file 4 bits} MB, by {memory 4 bits, cached} where",
        "and by at most {memory 4 bits, peak}.",
        "some 100 MB whatever the weights",
        "A decoder of 125 million parameters",
        "All {versions} versions of operators",
        "Of com.microsoft {microsoft} operators are",
    ),
    "docs/guides/speed.md": (
        *TABLE,
        "BERT-base takes {ready bert} s and ResNet-50 {ready resnet50} s, where onnxruntime takes "
        "{ready bert, onnxruntime} and {ready resnet50, onnxruntime}.",
        "BERT-base then takes {ready bert, cached} s, ResNet-50 {ready resnet50, cached} and MobileNetV2 "
        "{ready mobilenet_v2, cached}.",
    ),
    "docs/guides/generate.md": (
        "{genai float32} times its tokens per second in float32 and {genai 4 bits} in 4 bits, and with 8 prompts at a "
        "time {genai float32, 8} and {genai 4 bits, 8}.",
    ),
    "docs/guides/quantize.md": (),
    "docs/coming_from/onnxruntime.md": ("{microsoft} are supported",),
    "docs/coming_from/jaxonnxruntime.md": (),
    "docs/coming_from/pytorch.md": (),
}


def figures() -> dict[str, str]:
    """Every figure that pages quote, by name, as they write it."""
    performance = json.loads((DOCS / "performance.json").read_text())
    measured = json.loads((DOCS / "measured.json").read_text())
    apart = {name: value for group in measured.values() for name, value in group["figures"].items()}
    counted = json.loads((DOCS / "accelerators.json").read_text())
    found = (_conformance(), _exporters(), _speed(performance), _ready(performance), _accelerators(counted))
    return dict([*(pair for some in found for pair in some), *apart.items()])


def _conformance() -> Iterator[tuple[str, str]]:
    cases, drawn, supported = sum(COUNTS.values()), len(BERNOULLI | DROPOUT), onnx2jax.supported()
    yield "onnx", onnx.__version__
    yield "cases", str(cases)
    yield "passing", str(cases - len(FAILS))
    yield "by value", str(cases - len(FAILS) - drawn)
    yield "by distribution", str(drawn)
    yield "one program", str(cases - len(STAGED))
    yield "in one jit", str(cases - sum(map(len, NOT_IN_JIT.values())))
    yield "versions", str(len(onnx.defs.get_all_schemas_with_history()))
    yield "microsoft", str(len(supported["com.microsoft"]))
    yield "rules", str(len(rules()))


def _exporters() -> Iterator[tuple[str, str]]:
    summary = (
        r"(\d+) models of \d+ families: (\d+) right in every column, "
        r"(\d+) limited by something outside this project, 0 wrong"
    )
    (counts,) = re.findall(summary, (DOCS / "exporters.md").read_text())
    return zip(("exported", "exported right", "exported excused"), counts, strict=True)


def _speed(performance: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    groups = performance["groups"]
    timed = {g: {n: row for n, row in rows.items() if "seconds" in row} for g, rows in groups.items()}
    yield "onnxruntime", performance["machine"]["versions"]["onnxruntime"].rpartition(".")[0]
    yield "rows", str(sum(map(len, timed.values())) // 10 * 10)
    for name in (*COLUMNS, "int8_qdq"):
        for rival, ratio in timed["networks"][f"{name}, batch 1"]["ratios"].items():
            yield f"{name} / {rival}", f"{ratio['paired'][1]:.2f}"
    ratios = {n: row["ratios"]["onnxruntime"]["paired"][1] for n, row in timed["models"].items()}
    files = {n: r for n, r in ratios.items() if not n.startswith(("light_", "digits ")) and ": " not in n}
    yield "files", str(len(files))
    yield "files / onnxruntime", f"{median(files.values()):.2f}"
    int8 = [r for n, r in files.items() if "int8" in n]
    yield "int8 least", f"{min(int8):.2f}"
    yield "int8 most", f"{max(int8):.2f}"


def _ready(performance: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for row, found in performance["groups"]["ready"].items():
        name, memory = row.removesuffix(", batch 1"), found["memory"]
        for kind, more in (
            ("onnx2jax", ""),
            ("onnx2jax, from its cache", ", cached"),
            ("onnx2jax, background_compile", ", background"),
            ("onnxruntime", ", onnxruntime"),
        ):
            if kind not in found["ready"]:  # a table measured by an earlier release
                continue
            seconds = found["ready"][kind]
            yield f"ready {name}{more}", f"{seconds['convert wall'] + seconds['call wall']:.1f}"
            if kind in memory:
                yield f"memory {name}{more}", f"{memory[kind] / memory['weights and activations']:.1f}"


def _accelerators(counted: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    rows = [row for row in counted["networks"].values() if "ours" in row]
    yield "accelerated", str(len(rows))
    yield "accelerated / by hand", f"{median(r['ours']['bytes'] / r['by hand']['bytes'] for r in rows):.2f}"


def filled(text: str, page: str, known: Mapping[str, str]) -> str:
    """The text of a page with today's figures in its quotes."""
    for template in QUOTES[page]:
        pattern, names = _pattern(template)

        def quoted(match: re.Match[str], names: list[str] = names) -> str:
            return "".join(known[names[k // 2]] if k % 2 else part for k, part in enumerate(match.groups()))

        text, count = re.subn(pattern, quoted, text)
        if not count:
            raise ValueError(f"{page} no longer says {template!r}: adapt QUOTES in docs/make_figures.py")
    return text


def unquoted(text: str, page: str) -> list[str]:
    """Figures of a page, numbers with a point or of three digits and more, that are no quotes and no versions."""
    for silent in (r"^```.*?^```$", APART.pattern, r"`[^`\n]*`", r"\]\([^)\s]*\)", r"<!--.*?-->"):
        text = re.sub(silent, " ", text, flags=re.DOTALL | re.MULTILINE if silent.startswith("^") else re.NOFLAG)
    for template in QUOTES[page]:
        text = re.sub(_pattern(template)[0], " ", text)
    text = re.sub(r"(?:Python|jax|opset|CC BY|PyTorch \() ?[\d.]+", " ", text)
    return re.findall(r"(?<![\w.-])(?:\d+\.\d+|\d{3,})(?:e-?\d+)?(?!\w)", text)


def _pattern(template: str) -> tuple[str, list[str]]:
    """A template as a regular expression whose even groups are figures, and their names in order."""
    parts = re.split(r"\{(.+?)\}", template)
    literals = [re.sub(r"(?:\\ )+", r"\\s+", re.escape(part)) for part in parts[::2]]
    return r"(\d[\d.,]*(?<![.,]))".join(f"({literal})" for literal in literals), parts[1::2]


def pages(change: Callable[[str, str], Any]) -> dict[str, Any]:
    """What a function of a page's text and path gives, for each page."""
    return {page: change((ROOT / page).read_text(encoding="utf-8"), page) for page in QUOTES}


def main() -> None:
    known = figures()
    KEPT.write_text(json.dumps(known, indent=1) + "\n")
    for page, text in pages(lambda text, page: filled(text, page, known)).items():
        Path(ROOT / page).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
