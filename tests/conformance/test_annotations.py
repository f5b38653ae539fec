"""Rules TR for inference: training bindings are validated and otherwise ignored."""

from __future__ import annotations

from typing import Any

import pytest
from onnx import helper, numpy_helper

import onnx2jax
from tests.support.cases import MAIN, F, X, clean, parse, refused_when_strict, rule, rules_of, same

WEIGHTED = MAIN + " <float[2] w = {1, 1}, float[2] c = {2, 2}> { h = Add (x, w)  y = Mul (h, c) }"


def graph(nodes: list[Any], outputs: list[str], name: str = "t", inputs: Any = ()) -> Any:
    ends = [helper.make_tensor_value_info(n, 1, [2]) for n in outputs]
    return helper.make_graph(nodes, name, [helper.make_tensor_value_info(n, 1, [2]) for n in inputs], ends)


STEP = graph([helper.make_node("Sub", ["w", "h"], ["w_new"])], ["w_new"])
START = graph([helper.make_node("RandomNormal", [], ["w_0"], shape=[2])], ["w_0"])


def training(
    update: Any = (("w", "w_new"),), start: Any = (("w", "w_0"),), step: Any = STEP, initial: Any = START
) -> Any:
    """The model with one training_info; its bindings as pairs."""
    proto = parse(WEIGHTED)
    add(proto, update, start, step, initial)
    return proto


def add(proto: Any, update: Any, start: Any, step: Any = STEP, initial: Any = START) -> None:
    info = proto.training_info.add(algorithm=step, initialization=initial)
    for pairs, field in ((update, info.update_binding), (start, info.initialization_binding)):
        for key, value in pairs:
            field.add(key=key, value=value)


@rule("MV-09", "TR-28")
def test_a_legal_training_model_is_clean_and_infers() -> None:
    same(clean(training(), X), (X + 1) * 2)  # the algorithm reads w and h of the main graph
    empty = parse(WEIGHTED)
    empty.training_info.add()
    same(clean(empty, X), (X + 1) * 2)


@rule("TR-05")
def test_an_initialization_has_no_inputs() -> None:
    refused_when_strict(
        training(initial=graph([helper.make_node("Neg", ["i"], ["w_0"])], ["w_0"], inputs=["i"])), "TR-05"
    )


@rule("TR-07")
def test_a_binding_needs_its_graph() -> None:
    proto = training()
    proto.training_info[0].ClearField("initialization")
    refused_when_strict(proto, "TR-07")
    proto.training_info[0].ClearField("initialization_binding")
    assert onnx2jax.check(proto).findings == ()


@rule("TR-08")
def test_swapped_bindings_are_refused() -> None:
    refused_when_strict(training(update=[("w_new", "w")]), "TR-08")
    refused_when_strict(training(start=[("w_0", "w")]), "TR-08")


@rule("TR-09")
def test_a_variable_is_assigned_once() -> None:
    refused_when_strict(training(update=[("w", "w_new"), ("w", "w_new")]), "TR-09")
    twice = training()
    add(twice, [("w", "w_new")], [])
    refused_when_strict(twice, "TR-09")


@rule("TR-10")
@pytest.mark.parametrize("key", ["nope", "h", "x"])
def test_keys_are_initializers(key: str) -> None:
    refused_when_strict(training(update=[(key, "w_new")]), "TR-10")  # the checker validates nothing here


@rule("TR-10")
def test_an_initializer_of_another_algorithm_is_no_key() -> None:
    other = graph([helper.make_node("Neg", ["own"], ["t_new"])], ["t_new"])
    other.initializer.append(numpy_helper.from_array(F([0, 0]), "own"))
    proto = training()
    add(proto, [("own", "t_new")], [], other)
    assert onnx2jax.check(proto).findings == ()
    proto.training_info[0].update_binding.add(key="own", value="w_new")
    assert "TR-10" in rules_of(proto)


@rule("TR-11")
def test_values_are_outputs() -> None:
    inner = [helper.make_node("Neg", ["w"], ["i"]), helper.make_node("Neg", ["i"], ["w_new"])]
    refused_when_strict(training(update=[("w", "i")], step=graph(inner, ["w_new"])), "TR-11")
    same(clean(training(update=[("w", "y")]), X), (X + 1) * 2)  # outputs of the main graph are allowed


@rule("TR-16", "TR-17")
def test_main_graph_and_algorithm_are_one_graph() -> None:
    clash = graph([helper.make_node("Neg", ["w"], ["h"]), helper.make_node("Neg", ["h"], ["w_new"])], ["w_new"])
    refused_when_strict(training(step=clash), "TR-17")
    unknown = graph([helper.make_node("Neg", ["nope"], ["w_new"])], ["w_new"])
    refused_when_strict(training(step=unknown), "GR-01")


@rule("TR-29")
def test_a_sparse_initializer_is_no_variable() -> None:
    proto = training(update=[("s", "w_new")])
    values = numpy_helper.from_array(F([1]), "s")
    sparse = helper.make_sparse_tensor(values, helper.make_tensor("", 7, [1], [0]), [2])
    proto.graph.sparse_initializer.append(sparse)
    refused_when_strict(proto, "TR-29")
