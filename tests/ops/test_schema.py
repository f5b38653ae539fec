"""Every version of every operator that ONNX defines, against the signature of the function that implements it."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest

import onnx2jax
from onnx2jax.ir import binding
from onnx2jax.ops import registry
from onnx2jax.ops.description import FIXTURES
from onnx2jax.ops.registry import LEGACY_HINTS, Operator

Schema = onnx.defs.OpSchema
Option = Schema.FormalParameterOption
REQUIRED = inspect.Parameter.empty

"""Operators that are not yet supported, each with the reason."""

_NO_DEFAULT = "the schema says optional, the text says required: there is nothing to compute without it"
_IN_TEXT = "the default stands in the text of the specification only"
_NODES = ("falsenodeids", "featureids", "modes", "nodeids", "treeids", "truenodeids")
DEVIATIONS = {
    ("Clip", "max"): "the element type's own bound, which the schema writes as float32's",
    ("Clip", "min"): "the element type's own bound, which the schema writes as float32's",
    ("Concat", "axis"): _IN_TEXT,
    ("GRU", "direction"): "version 1 misspells it 'foward'",
    ("Reshape", "shape"): _NO_DEFAULT,
    ("Split", "axis"): "version 1 has no default, version 2 has 0",
    ("ai.onnx.ml.CategoryMapper", "cats_int64s"): _NO_DEFAULT,
    ("ai.onnx.ml.CategoryMapper", "cats_strings"): _NO_DEFAULT,
    ("ai.onnx.ml.LabelEncoder", "classes_strings"): _NO_DEFAULT,
    ("ai.onnx.ml.LinearRegressor", "coefficients"): _NO_DEFAULT,
    **{("ai.onnx.ml.TreeEnsemble", k): _NO_DEFAULT for k in ("n_targets",)},
    **{("ai.onnx.ml.TreeEnsembleClassifier", f"class_{k}"): _NO_DEFAULT for k in ("ids", "nodeids", "treeids")},
    **{("ai.onnx.ml.TreeEnsembleClassifier", f"nodes_{k}"): _NO_DEFAULT for k in _NODES},
    **{("ai.onnx.ml.TreeEnsembleRegressor", f"nodes_{k}"): _NO_DEFAULT for k in _NODES},
    **{("ai.onnx.ml.TreeEnsembleRegressor", k): _NO_DEFAULT for k in ("n_targets",)},
    **{("ai.onnx.ml.TreeEnsembleRegressor", f"target_{k}"): _NO_DEFAULT for k in ("ids", "nodeids", "treeids")},
    **{("Resize", k): "versions 11 and 12 require it, and files leave it out" for k in ("roi", "scales")},
    ("RegexFullMatch", "pattern"): _NO_DEFAULT,
    ("ai.onnx.ml.SVMClassifier", "coefficients"): _NO_DEFAULT,
    ("ai.onnx.ml.SVMClassifier", "rho"): "an intercept left out is 0",
    ("ai.onnx.ml.SVMRegressor", "coefficients"): _NO_DEFAULT,
    ("ai.onnx.ml.SVMRegressor", "rho"): "an intercept left out is 0",
    ("ai.onnx.ml.Scaler", "offset"): "an offset left out is 0",
    ("ai.onnx.ml.Scaler", "scale"): "a factor left out is 1",
}
"""(operator, attribute) whose default is not the schema's, each with the reason."""

_WITHDRAWN = "an experimental operator that onnx 1.5 withdrew; old files hold it"
OUTSIDE = {
    "Affine": _WITHDRAWN,
    "Crop": _WITHDRAWN,
    "DynamicSlice": _WITHDRAWN,
    "GivenTensorFill": _WITHDRAWN,
    "ImageScaler": _WITHDRAWN,
    "ParametricSoftplus": _WITHDRAWN,
    "Scale": _WITHDRAWN,
    "ScaledTanh": _WITHDRAWN,
    "SimplifiedLayerNormalization": "onnxruntime writes it into ONNX's own domain",
}
"""Supported operators in ONNX's domains that onnx.defs does not define."""

EARLIER = {"LayerNormalization": 1, "MeanVarianceNormalization": 1}
"""Operators that onnxruntime runs below the first opset that defines them, from the opset named on."""

_MORE = "onnxruntime accepts it in all versions, and it means what it means later"
CHOICES = {
    ("Pad", "mode"): ({"wrap"}, _MORE),
    ("ScatterElements", "reduction"): ({"max", "min"}, _MORE),
    ("ScatterND", "reduction"): ({"max", "min"}, _MORE),
}
"""(operator, attribute) -> the values accepted before the version that lists them, and the reason."""


def _full_name(schema: Schema) -> str:
    return f"{schema.domain}.{schema.name}" if schema.domain else schema.name


def _history() -> dict[str, list[Schema]]:
    """All versions by operator, oldest first."""
    history = defaultdict(list)
    for schema in sorted(onnx.defs.get_all_schemas_with_history(), key=lambda s: s.since_version):
        history[_full_name(schema)].append(schema)
    return dict(sorted(history.items()))


HISTORY = _history()


def _implementing(schema: Schema) -> Operator | None:
    return registry.resolve(schema.domain, schema.name, schema.since_version)


def test_every_operator_is_supported() -> None:
    assert len(HISTORY) == 227
    assert sum(map(len, HISTORY.values())) == 659
    assert [str(v) for versions in HISTORY.values() for v in versions if _implementing(v) is None] == []


@pytest.mark.rule("ND-11")
@pytest.mark.parametrize("name", list(HISTORY))
def test_signatures(name: str) -> None:
    groups: dict[int, list[Schema]] = defaultdict(list)
    for version in HISTORY[name]:
        operator = _implementing(version)
        assert operator is not None
        groups[operator.since].append(version)
    table = onnx2jax.supported()[HISTORY[name][0].domain][HISTORY[name][0].name]
    earlier = {EARLIER[name]} if name in EARLIER else set()
    assert set(table) == set(groups) | earlier, (
        "a registration that implements no version, or begins where the schema does not change"
    )
    deviations = {attribute for operator, attribute in DEVIATIONS if operator == name}
    problems = {(about, text) for versions in groups.values() for about, text in _problems(versions, HISTORY[name])}
    assert [text for about, text in sorted(problems) if about not in deviations] == []
    assert deviations <= {about for about, _ in problems}, "no longer a deviation"


def test_choices_are_those_of_each_version() -> None:
    """The text of each version lists the values of an attribute; numbers are not listed in a form that can be read."""
    used = set()
    for name, versions in HISTORY.items():
        for version in versions:
            operator = _implementing(version)
            for attribute in version.attributes.keys() & (operator.choices.keys() if operator else ()):
                text = version.attributes[attribute].description + version.doc
                words = {c for c in operator.choices[attribute] if isinstance(c, str)}
                accepted = {c for c in words if not re.search(rf"\b{c}\b", text)}
                listed = {c for v in versions for o in [_implementing(v)] if o for c in o.choices.get(attribute, ())}
                listed = {c for c in listed if isinstance(c, str) and re.search(rf"[\"'`]{c}[\"'`]", text)}
                assert accepted <= CHOICES.get((name, attribute), (set(), ""))[0], (name, version.since_version)
                assert listed <= words, (name, version.since_version)
                used |= {(name, attribute)} if accepted else set()
    assert used == CHOICES.keys()


def test_defaults_are_among_the_choices() -> None:
    for name, versions in HISTORY.items():
        for operator in {o.since: o for v in versions if (o := _implementing(v)) and o.function}.values():
            defaults = {n: p.default for n, p in inspect.signature(operator.function).parameters.items()}
            odd = [k for k, choices in operator.choices.items() if defaults[k] not in (REQUIRED, *choices)]
            assert odd == [], name


def test_every_operator_is_defined_by_onnx() -> None:
    supported = {
        f"{d}.{n}" if d else n for d, names in onnx2jax.supported().items() if d in binding.NEWEST for n in names
    }
    assert supported - set(HISTORY) == set(OUTSIDE)


def test_newest_versions() -> None:
    newest: dict[str, int] = defaultdict(int)
    for (version,) in ((max(vs, key=lambda v: v.since_version),) for vs in HISTORY.values()):
        newest[version.domain] = max(newest[version.domain], version.since_version)
    assert binding.NEWEST.keys() == newest.keys()
    assert binding.NEWEST[""] == onnx.defs.onnx_opset_version()
    assert all(binding.NEWEST[domain] >= version for domain, version in newest.items())


def _problems(versions: list[Schema], history: list[Schema]) -> Iterator[tuple[str, str]]:
    """What is wrong with the function that implements these versions of one operator: (parameter, sentence)."""
    operator = _implementing(versions[0])
    assert operator is not None
    for v in versions:
        if v.deprecated != (operator.function is None):
            yield "", f"{v.since_version}: deprecated is {v.deprecated} in the schema"
    if operator.function is None:
        return
    attributes = {a for v in history for a in v.attributes}
    for name in operator.attributes - attributes - FIXTURES:
        yield name, f"attribute {name!r} is in no version"
    newest = versions[-1]
    for position, name in enumerate(operator.inputs):
        newest_name = newest.inputs[position].name if position < len(newest.inputs) else None
        if name != newest_name and name not in attributes:
            yield name, f"input {position} is called {name!r}, in version {newest.since_version} {newest_name!r}"
    defaults = {n: p.default for n, p in inspect.signature(operator.function).parameters.items()}
    for version in versions:
        for position, formal in enumerate(version.inputs):
            problem = _input_problem(operator, defaults, versions, position, formal)
            if problem:
                yield formal.name, f"{version.since_version}: input {position} {formal.name!r} {problem}"
        for name, attribute in version.attributes.items():
            problem = _attribute_problem(operator, defaults, versions, attribute)
            if problem and name not in LEGACY_HINTS:
                yield name, f"{version.since_version}: attribute {name!r} {problem}"


def _input_problem(
    operator: Operator, defaults: dict[str, Any], versions: list[Schema], position: int, formal: Any
) -> str:
    if formal.option == Option.Variadic:
        return "" if operator.variadic else "is variadic"
    name = operator.parameter(position)
    if name is None:
        return "is not accepted"
    if name == operator.variadic:
        return ""
    required = defaults[name] is REQUIRED
    if formal.option == Option.Optional:
        return "is optional" if required else ""
    may_be_absent = any(
        position >= len(v.inputs) or v.inputs[position].option == Option.Optional or name in v.attributes
        for v in versions
    )
    return "" if required or may_be_absent else "is required"


def _attribute_problem(operator: Operator, defaults: dict[str, Any], versions: list[Schema], attribute: Any) -> str:
    name = attribute.name
    if name not in operator.attributes and name not in operator.inputs:
        return "is not accepted"
    ours, default = defaults[name], _default(attribute)
    if attribute.required:
        always = all(name in v.attributes and v.attributes[name].required for v in versions)
        return "is required" if always and ours is not REQUIRED else ""
    absent = default is None and ours in (None, (), "")
    return "" if absent or _same(ours, default) else f"is {default!r} by default, not {ours!r}"


def _default(attribute: Any) -> Any:
    """A schema's default as it would reach the operator; None when there is none."""
    message = attribute.default_value
    if not message.name:
        return None
    value = onnx.helper.get_attribute_value(message)
    if isinstance(value, bytes):
        return value.decode()
    return tuple(v.decode() if isinstance(v, bytes) else v for v in value) if isinstance(value, list) else value


def _same(ours: Any, default: Any) -> bool:
    if isinstance(default, float) and isinstance(ours, float):
        return bool(np.float32(ours) == np.float32(default))
    if isinstance(default, onnx.TensorProto) or ours is REQUIRED:
        return False
    return type(ours) is type(default) and bool(ours == default)
