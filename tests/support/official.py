"""The official cases of ONNX (onnx.backend.test): loading, joining, comparing, and the few that draw random numbers.

python -m tests.support.official NAME...     # these cases, each alone
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
import pytest
from onnx import compose, numpy_helper

import onnx2jax
from onnx2jax.eval.values import to_host
from tests.support import emitters

VERSION = "1.23.2"
"""The release of onnx to which the counts and the manifest apply."""
COUNTS = {"node": 1884, "pytorch-converted": 82, "pytorch-operator": 35, "real": 9, "simple": 23}
"""Number of cases by kind; the nine `real` ones are the light models, which generate their weights."""
BERNOULLI = {f"test_bernoulli{kind}{form}" for kind in ("", "_double", "_seed") for form in ("", "_expanded")}
"""ONNX specifies no random generator, not even for a seed: these are compared by type, shape and frequencies."""
DROPOUT = {f"test_training_dropout{kind}" for kind in ("", "_mask", "_default", "_default_mask")}
"""Likewise, if the ratio is not 0."""
ROOT = Path(onnx.__file__).parent
KEPT = Path(sys.prefix) / f".official-onnx{onnx.__version__}-numpy{np.__version__}.pickle"
"""The computed cases, in the environment whose packages they depend on."""
BATCH = 40
"""Cases in one program: to compile one takes some 30 ms, whatever is in it; beyond a hundred cases it takes longer."""

Case = Any
"""onnx.backend.test.case.test_case.TestCase"""
Route = Callable[..., list[Any]]
"""``run`` or ``call``."""


@functools.cache
def cases() -> dict[str, Case]:
    """All cases by name, in an order that is the same in every process."""
    from onnx.backend.test.loader import load_model_tests

    found = [*_computed(), *(case for kind in COUNTS if kind != "node" for case in load_model_tests(kind=kind))]
    by_name = {case.name: case for case in found}
    assert len(by_name) == len(found)
    return dict(sorted(by_name.items()))


def _computed() -> list[Case]:
    """The cases whose expected outputs onnx computes when it imports them: seven seconds once, then from disk."""
    if KEPT.exists():
        return pickle.loads(KEPT.read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.loader import load_model_tests

        found = load_model_tests(kind="node")
    with tempfile.NamedTemporaryFile(dir=KEPT.parent, delete=False) as file:
        pickle.dump(found, file)
    Path(file.name).replace(KEPT)  # other processes find all of it or nothing
    return found


def load(case: Case) -> tuple[onnx.ModelProto, list[tuple[list[Any], list[Any]]]]:
    """A case's model, and its sets of inputs and outputs as NumPy."""
    if case.model is not None:
        return case.model, [([_value(v) for v in inputs], [_value(v) for v in out]) for inputs, out in case.data_sets]
    if case.url is not None:
        return _light(ROOT.parent / case.url)
    folder = Path(case.model_dir)
    model = onnx.load(folder / "model.onnx")
    sets = sorted(folder.glob("test_data_set*"))
    return model, [(_files(s, "input", model.graph.input), _files(s, "output", model.graph.output)) for s in sets]


def _light(path: Path) -> tuple[onnx.ModelProto, list[tuple[list[Any], list[Any]]]]:
    """One of the nine light models, with the input of onnx's own runner."""
    model = onnx.load(path)
    (image,) = free_inputs(model)
    shape = [d.dim_value for d in image.type.tensor_type.shape.dim]
    size = int(np.prod(shape))
    expected = onnx.load_tensor(path.with_name(f"{path.stem}_output_0.pb"))
    return model, [([(np.arange(size).reshape(shape) / size).astype(np.float32)], [numpy_helper.to_array(expected)])]


def free_inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """The inputs without a default."""
    defaults = {t.name for t in model.graph.initializer}
    return [v for v in model.graph.input if v.name not in defaults]


def _files(folder: Path, what: str, declared: Any) -> list[Any]:
    count = len(list(folder.glob(f"{what}_*.pb")))
    return [_read(folder / f"{what}_{i}.pb", declared[i].type) for i in range(count)]


def _read(path: Path, kind: onnx.TypeProto) -> Any:
    content = path.read_bytes()
    match kind.WhichOneof("value"):
        case "sequence_type":
            return numpy_helper.to_list(onnx.SequenceProto.FromString(content))
        case "optional_type":
            return numpy_helper.to_optional(onnx.OptionalProto.FromString(content))
        case "map_type":
            return numpy_helper.to_dict(onnx.MapProto.FromString(content))
        case _:
            return numpy_helper.to_array(onnx.TensorProto.FromString(content))


def _value(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def batches(some: Iterable[Case]) -> Iterator[tuple[Case, ...]]:
    """The cases in their order, BATCH at a time."""
    rest = iter(some)
    return iter(lambda: tuple(itertools.islice(rest, BATCH)), ())


def imports(case: Case) -> tuple[Any, ...]:
    """What the models of cases have to share to be joined: the IR version and the operator sets."""
    message, _ = load(case)
    return message.ir_version, sorted((o.domain, o.version) for o in message.opset_import)


def joined(some: Sequence[Case]) -> tuple[onnx.ModelProto, dict[str, Any], dict[str, list[Any]]]:
    """One model of several cases' graphs side by side, its inputs, and the expected outputs by case."""
    result = onnx.ModelProto(ir_version=load(some[0])[0].ir_version)
    result.opset_import.extend(load(some[0])[0].opset_import)
    result.graph.name = "cases"
    feeds: dict[str, Any] = {}
    outputs: dict[str, list[Any]] = {}
    for case in some:
        message, [(inputs, expected)] = load(case)
        message = compose.add_prefix(message, f"{case.name}/")
        for field in ("node", "input", "output", "initializer", "sparse_initializer", "value_info"):
            getattr(result.graph, field).extend(getattr(message.graph, field))
        feeds |= zip([v.name for v in free_inputs(message)], inputs, strict=True)
        outputs[case.name] = expected
    return result, feeds, outputs


def together(some: Sequence[Case]) -> dict[str, list[list[Any]]]:
    """For each case the outputs of ``run`` and those of a call, of a model of all of them that is one program."""
    message, feeds, expected = joined(some)
    model = onnx2jax.convert(message)
    with emitters.newer(needs_newer_emitters(some)):
        results = [iter(route(model, feeds)) for route in (run, call)]
    assert model.jitted, model.explain()
    return {name: [list(itertools.islice(r, len(values))) for r in results] for name, values in expected.items()}


def needs_newer_emitters(some: Iterable[Case]) -> bool:
    """Whether cases cast to types of ``tests.support.emitters``."""
    return any("FNUZ" in case.name for case in some)


@contextlib.contextmanager
def subtest(subtests: Any, case: Case) -> Iterator[None]:
    """A subtest that is reported where it fails; each report takes as long as most cases."""
    try:
        yield
    except (Exception, pytest.fail.Exception):
        with subtests.test(case=case.name):
            raise


def check(case: Case, routes: Sequence[Route] | None = None) -> onnx2jax.Model:
    """Compare ``run`` and a call with the case's expected outputs; returns the model."""
    message, sets = load(case)
    if case.name in BERNOULLI | DROPOUT:
        message = _without_seed(message)
    model = onnx2jax.convert(message)
    for inputs, expected in sets:
        feeds = dict(zip([v.name for v in free_inputs(message)], inputs, strict=True))
        for route in routes or (run, call):
            try:
                with emitters.newer(needs_newer_emitters([case])):
                    _compare(case, expected, feeds, functools.partial(route, model, feeds))
            except Exception as e:
                e.add_note(f"by {route.__name__}")
                raise
    return model


def run(model: onnx2jax.Model, feeds: dict[str, Any], **rng: Any) -> list[Any]:
    """``run`` of all outputs: the smallest programs are computed by NumPy."""
    return model.run(None, feeds, **rng)


def call(model: onnx2jax.Model, feeds: dict[str, Any], **rng: Any) -> list[Any]:
    """A call's outputs on the host: computed by XLA even for the smallest programs."""
    return outputs(model(**feeds, **rng))


def outputs(results: Any) -> list[Any]:
    """The outputs of a call as ``run`` returns them."""
    return to_host(list(results) if isinstance(results, tuple) else [results])


def compare(case: Case, results: list[Any], expected: list[Any]) -> None:
    """Results equal to what the case expects."""
    for result, value in zip(results, expected, strict=True):
        assert_same(result, value, case.rtol, absolute_tolerance(case))


def _compare(case: Case, expected: list[Any], feeds: dict[str, Any], results: Callable[..., list[Any]]) -> None:
    if case.name in BERNOULLI:
        # ONNX's expansion has the comparison reversed: it draws 1 if the number is above p.
        _check_bernoulli(results, feeds, expected[0], flipped=case.name.endswith("_expanded"))
    elif case.name in DROPOUT:
        _check_dropout(results, feeds, expected)
    else:
        compare(case, results(), expected)


def absolute_tolerance(case: Case) -> float:
    """What the official runner allows, but for Fourier transforms: NumPy's releases round results near zero apart."""
    return 1e-6 if case.name.startswith("test_dft") else case.atol


def assert_same(result: Any, expected: Any, rtol: float, atol: float) -> None:
    """Same structure, element type and shape; floating values within the tolerance, all others equal."""
    if isinstance(expected, list | tuple):
        assert isinstance(result, list | tuple), f"{type(result)} is no sequence"
        assert len(result) == len(expected)
        for r, e in zip(result, expected, strict=True):
            assert_same(r, e, rtol, atol)
    elif isinstance(expected, dict):
        assert isinstance(result, dict)
        assert result.keys() == expected.keys()
        for key in expected:
            assert_same(result[key], expected[key], rtol, atol)
    elif expected is None:
        assert result is None
    else:
        _assert_same_tensor(result, np.asarray(expected), rtol, atol)


def _assert_same_tensor(result: Any, expected: np.ndarray, rtol: float, atol: float) -> None:
    assert isinstance(result, np.ndarray)
    assert result.shape == expected.shape
    if expected.dtype.kind in "OUST":
        assert result.dtype == object
        assert [str(v) for v in result.flat] == [str(v) for v in expected.flat]
        return
    assert result.dtype == expected.dtype
    if expected.dtype.kind in "biu" or expected.dtype.name.startswith(("int", "uint")):
        np.testing.assert_array_equal(result, expected)
        return
    if expected.dtype.name == "bfloat16":
        rtol = max(rtol, 2**-6)  # two units in the last place, as onnx's own runner allows
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    np.testing.assert_allclose(result.astype(wide), expected.astype(wide), rtol=rtol, atol=atol)


def _without_seed(message: onnx.ModelProto) -> onnx.ModelProto:
    """Remove the seed, with which every draw would be the same."""
    result = onnx.ModelProto()
    result.CopyFrom(message)
    for node in result.graph.node:
        kept = [a for a in node.attribute if a.name != "seed"]
        del node.attribute[:]
        node.attribute.extend(kept)
    return result


def _draws(results: Callable[..., list[Any]], times: int = 100) -> list[list[Any]]:
    return [results(rng=jax.random.key(i)) for i in range(times)]


def _check_bernoulli(
    results: Callable[..., list[Any]], feeds: dict[str, Any], expected: np.ndarray, flipped: bool
) -> None:
    (p,) = feeds.values()
    draws = [result for (result,) in _draws(results)]
    assert all(d.dtype == expected.dtype and d.shape == expected.shape for d in draws)
    assert set(np.unique(draws)) <= {0, 1}
    _check_frequency(np.mean(draws, axis=0), 1 - p if flipped else p, len(draws))


def _check_dropout(results: Callable[..., list[Any]], feeds: dict[str, Any], expected: list[Any]) -> None:
    x, ratio, _ = feeds.values()
    draws = _draws(results)
    for draw in draws:
        assert [(d.dtype, d.shape) for d in draw] == [(e.dtype, e.shape) for e in expected]
        kept = draw[0] != 0
        np.testing.assert_allclose(draw[0], np.where(kept, x / (1 - ratio), 0), rtol=1e-5)
        for mask in draw[1:]:
            np.testing.assert_array_equal(mask, kept)
    _check_frequency(np.mean([d[0] != 0 for d in draws]), 1 - ratio, len(draws) * x.size)


def _check_frequency(frequency: Any, probability: Any, draws: int) -> None:
    """Within five standard deviations."""
    deviation = np.sqrt(probability * (1 - probability) / draws)
    np.testing.assert_array_less(np.abs(frequency - probability), 5 * deviation + 1e-9)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        check(cases()[name])
