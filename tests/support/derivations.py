"""State machine rules that derive models from models, under different JAX configurations."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import pickle
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant
from hypothesis.stateful import rule as hypothesis_rule
from onnx import helper

import onnx2jax
from tests.support.confusable import CASES, Rng, real
from tests.support.models import model, value
from tests.support.subjects import FORMS, Subject, assert_same, converted, deleted, other_params, spoil

MOST = 5
"""Number of models that a machine holds."""
COUNTS: Counter[str] = Counter()
"""How often each rule ran."""


def rule(**strategies: Any) -> Callable[[Any], Any]:
    """A counted rule of the state machine."""

    def counted(function: Callable[..., None]) -> Any:
        @functools.wraps(function)
        def inside(self: Any, **drawn: Any) -> None:
            function(self, **drawn)
            COUNTS[function.__name__] += 1

        return hypothesis_rule(**strategies)(inside)

    return counted


def device(number: int) -> Any:
    """A scope with another default device of the CPU; 0: as the process started."""
    return jax.default_device(jax.devices("cpu")[number] if number else None)


SETTINGS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "x64": (jax.enable_x64, (False, True)),
    "precision": (jax.default_matmul_precision, (None, "highest", "float32")),
    "nans": (jax.debug_nans, (False, True)),
    "no jit": (jax.disable_jit, (False, True)),
    "promotion": (jax.numpy_dtype_promotion, ("standard", "strict")),
    "device": (device, (0, 3)),
}
"""Ways to configure JAX, the default first."""
whole = st.integers(0, 2**16)
names = st.sampled_from(sorted(CASES))


class Derivations(RuleBasedStateMachine):
    """Models, models derived from them, and the results of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.subjects: list[Subject] = []
        self.kept: list[tuple[list[Any], list[np.ndarray]]] = []
        """Results of earlier calls, and copies of them."""
        self.folder, self.saved = tempfile.TemporaryDirectory(), 0
        self.configuration = {name: values[0] for name, (_, values) in SETTINGS.items()}

    @contextmanager
    def configured(self) -> Iterator[None]:
        """JAX in the caller's configuration."""
        with ExitStack() as stack:
            for name, setting in self.configuration.items():
                stack.enter_context(SETTINGS[name][0](setting))
            yield

    def draw(self, k: int) -> tuple[Subject, Rng]:
        """One of the models, and a random generator for it."""
        return self.subjects[k % len(self.subjects)], np.random.default_rng(k)

    def add(self, subject: Subject) -> None:
        self.subjects = [*self.subjects, subject][-MOST:]

    def feeds(self, subject: Subject, rng: Rng, forms: list[str]) -> tuple[dict[str, Any], list[np.ndarray], Any]:
        """Inputs in different forms, the expected outputs, and a random key."""
        sizes = (1, 2, 5) if subject.options.get("rebatch") else subject.case.sizes
        weights = np.array([0.1 if n > 100 else 1 for n in sizes])
        feeds = subject.feeds(rng, int(rng.choice(sizes, p=weights / weights.sum())))
        seed = int(rng.integers(3)) if subject.case.draws else None
        expected = [np.array(v) for v in subject.expected(feeds, seed or 0)]
        typed = subject.typed
        given = {
            n: FORMS[form if n in typed or form != "list" else "numpy"](v)
            for (n, v), form in zip(feeds.items(), itertools.cycle(forms), strict=False)
        }
        return {**feeds, **given}, expected, seed

    def check(self, results: Any, expected: list[np.ndarray], **options: Any) -> None:
        """Compare results, and keep them for later comparisons."""
        assert_same(results, expected, **options)
        if not options:
            self.kept = [*self.kept, (results, expected)][-6:]

    @invariant()
    def results_of_earlier_calls_are_as_they_were(self) -> None:
        for results, expected in self.kept:
            assert_same(results, expected)

    def teardown(self) -> None:
        self.subjects, self.kept = [], []
        gc.collect()
        self.folder.cleanup()

    # -------------------------------------------------------------------------------------------------- models

    @initialize(name=names)
    def begin(self, name: str) -> None:
        self.add(converted(CASES[name]))
        COUNTS["begin"] += 1

    @rule(
        name=names,
        optimize=st.sampled_from([False, True, {"skip": ["hoist_params"]}, {"skip": ["dot_layout", "fold_batchnorm"]}]),
        k=whole,
    )
    def convert(self, name: str, optimize: Any, k: int) -> None:
        case, rng = CASES[name], np.random.default_rng(k)
        drawn = case.feeds(rng, int(rng.choice(case.sizes[:4])))
        fixed = {n: v for n, v in drawn.items() if n in case.decides and rng.integers(2)}
        fixed |= {"shape": np.array([2, -1])} if "shape" in fixed else {}  # it accepts all sizes
        options = dict(rng.choice(case.options)) if case.options and rng.integers(2) else {}
        if name == "single":
            options = {"rebatch": True}
        with self.configured():
            self.add(converted(case, fixed=fixed, options=options, optimize=optimize))

    @rule(k=whole, way=st.sampled_from(["copy", "deepcopy", "pickle"]))
    def duplicate(self, k: int, way: str) -> None:
        subject, _ = self.draw(k)
        if way == "pickle" and subject.functions:
            return  # a test's functions cannot be pickled
        with self.configured():
            made = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m))}
            self.add(replace(subject, model=made[way](subject.model), jitted=None))

    @rule(k=whole, external=st.booleans())
    def save_and_convert(self, k: int, external: bool) -> None:
        subject, _ = self.draw(k)
        if not subject.is_whole:
            return
        self.saved += 1
        path = Path(self.folder.name) / f"m{self.saved}.onnx"  # the file stays: data may be read on first access
        with self.configured():
            onnx2jax.save(subject.model, path, external_data=external, size_threshold=0)
            outputs = [n for n in subject.outputs if not n.endswith("/count")]  # options are not in the file
            new = {"model": onnx2jax.convert(path), "outputs": outputs, "fixed": {}, "options": {}, "jitted": None}
            self.add(replace(subject, **new))
            params = {
                n: v
                for n, v in self.subjects[-1].model.params.items()
                if n in subject.params and n not in subject.folded
            }
            assert_same([*params.values()], [subject.params[n] for n in params])

    @rule(k=whole)
    def simplify(self, k: int) -> None:
        subject, _ = self.draw(k)
        if not subject.is_whole or subject.options.keys() & {"dtype", "weights", "max_size"}:
            return
        with self.configured():
            other = subject.model.simplified()
        self.add(replace(subject, model=other, folded={*subject.folded, *subject.model.params}, jitted=None))

    @rule(k=whole)
    def new_shapes(self, k: int) -> None:
        """The mean's weights may have any extent."""
        subject, rng = self.draw(k)
        if subject.case is not CASES["hoisted"] or not subject.changeable:
            return
        new = {"W": real(rng, int(rng.integers(1, 9)))}
        with self.configured():
            other = subject.model.with_params({n: v.copy() for n, v in new.items()}, new_shapes=True)
        self.add(replace(subject, model=other, params=subject.params | new, jitted=None))

    @rule(k=whole)
    def finetune(self, k: int) -> None:
        """A step of gradient descent on the sum of y, whose gradient differences of two steps give exactly."""
        subject, rng = self.draw(k)
        if subject.case not in (CASES["hoisted"], CASES["scalars"]) or not subject.is_whole or subject.options:
            return
        if not subject.changeable or subject.joined or self.configuration["no jit"]:
            return
        feeds, _, _ = self.feeds(subject, rng, ["numpy"])
        trained = {n: np.array(subject.params[n], np.float64) for n in subject.changeable}

        def total(name: str, direction: np.ndarray) -> float:
            moved = {name: trained[name] + direction}
            return float(replace(subject, params=subject.params | moved).expected(feeds)[0].sum(dtype=np.float64))

        def gradient(name: str) -> np.ndarray:
            units = np.eye(trained[name].size).reshape(-1, *trained[name].shape)
            return np.reshape([(total(name, u) - total(name, -u)) / 2 for u in units], trained[name].shape)

        with self.configured():
            tuned = onnx2jax.finetune(subject.model, lambda y, _: y.sum(), optax.sgd(2.0**-6))
            state, _ = tuned.step(tuned.init(), feeds)
            other = tuned.to_model(state)
            tuned.step(state, self.feeds(subject, rng, ["numpy"])[0])  # which donates the buffers of the state
        params = {n: (trained[n] - 2.0**-6 * gradient(n)).astype(np.float32) for n in tuned.trainable}  # not scalars
        self.add(replace(subject, model=other, params=subject.params | params, jitted=None))

    @rule(k=whole, kind=st.sampled_from(["same", "other", "numpy", "view", "rewritten", "jax", "donated"]))
    def with_params(self, k: int, kind: str) -> None:
        subject, rng = self.draw(k)
        new = other_params(rng, subject)
        new = {n: np.array(subject.params[n]) for n in new} if kind == "same" else new
        if kind == "view":
            new = {n: np.broadcast_to(real(rng), v.shape) for n, v in new.items()}
        given = {n: FORMS["jax"](v) if kind in ("jax", "donated") else FORMS["aligned"](v) for n, v in new.items()}
        if kind == "view":
            given = {n: np.broadcast_to(v.ravel()[:1].reshape((1,) * v.ndim), v.shape) for n, v in given.items()}
        for array in given.values():
            if kind == "rewritten":
                array.flags.writeable = False
        with self.configured():
            other = subject.model.with_params(given)
        for array in given.values():
            spoil(array) if kind != "donated" else deleted(array)
        params = subject.params | {n: np.array(v) for n, v in new.items()}
        self.add(replace(subject, model=other, params=params, jitted=None))

    @rule(k=whole)
    def cut_at_outputs(self, k: int) -> None:
        subject, rng = self.draw(k)
        if subject.case.draws or subject.options.keys() - {"rebatch"} or subject.joined:
            return
        available = subject.inner
        chosen = [n for n in available if rng.integers(2)] or available[:1]
        with self.configured():
            other = subject.model.cut(outputs=chosen)
        self.add(replace(subject, model=other, outputs=chosen, is_whole=False, jitted=None))

    @rule(k=whole)
    def cut_at_inputs(self, k: int) -> None:
        subject, rng = self.draw(k)
        inner = [n for n in subject.inner if n not in subject.outputs]
        if subject.case.draws or subject.options or subject.joined or not inner:
            return
        chosen = str(rng.choice(inner))
        with self.configured():
            other = subject.model.cut(inputs=[chosen])
        functions = {n: f for n, f in subject.functions.items() if n != chosen}
        given = (*subject.given, chosen)
        self.add(replace(subject, model=other, given=given, functions=functions, is_whole=False, jitted=None))

    @rule(k=whole, factor=st.sampled_from([-1, 2]))
    def replace_values(self, k: int, factor: int) -> None:
        subject, rng = self.draw(k)
        fixed = {"where", "r" if subject.case.decides else "where", *subject.functions}
        inner = [n for n in subject.inner if n not in fixed]
        if subject.case.draws or subject.options.keys() - {"rebatch"} or subject.joined or not inner:
            return
        if subject.case is CASES["texts"]:
            return
        chosen = str(rng.choice(inner))

        def function(v: Any) -> Any:
            return v * v.dtype.type(factor)

        with self.configured():
            other = subject.model.replace({chosen: function})
        functions = {**subject.functions, chosen: function}
        self.add(replace(subject, model=other, functions=functions, is_whole=False, jitted=None))

    @rule(k=whole)
    def join(self, k: int) -> None:
        subject, _ = self.draw(k)
        if not subject.is_whole or subject.options or subject.fixed or subject.joined:
            return
        if subject.case is CASES["texts"] or "y" not in subject.outputs:
            return
        dtype = subject.expected(subject.feeds(np.random.default_rng(0), 1))[subject.outputs.index("y")].dtype
        nodes = [helper.make_node("Neg", ["q"], ["negative"])]
        second = model(nodes, [value("q", dtype, None)], [value("negative", dtype, None)])
        with self.configured():
            other = onnx2jax.join(subject.model, second, {"y": "q"})
        outputs = [*(n for n in subject.outputs if n != "y"), "negative"]
        joined = {"negative": lambda v: -v["y"]}
        self.add(replace(subject, model=other, outputs=outputs, joined=joined, jitted=None))
