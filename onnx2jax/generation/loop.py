"""Generation as one program: a loop on the device that feeds each token back, with the caches written in place.

Two programs are compiled: the first call with the choice of the first token, and the loop with the rest. How many
tokens are wanted, temperatures and what ends a text are arguments of theirs: other numbers are no other program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import compat
from ..errors import InputValueError
from ..runtime.cpu.pipeline import Options
from ..runtime.executable import Executable, Kept, compiled_to_keep, unless_configured
from ..runtime.memory import trim_heap
from .cache import Cache
from .kept import Folder
from .sampling import Chooser
from .steps import Steps

NEVER: Final = -2
"""In an ending: matches no token."""
ANY: Final = -1
"""In an ending: matches every token."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Texts while they are generated.

    Attributes:
        cache: of all tokens but the last.
        last: int32[batch], the last token of each text.
        logits: [batch, vocabulary], those behind the token before it.
        tokens: int32[batch, room], what has been generated.
        count: int32, how many tokens that is.
        lengths: int32[batch], how many of them are of the text.
        done: bool[batch], the texts that have ended.
    """

    cache: Cache
    last: Any
    logits: Any
    tokens: Any
    count: Any
    lengths: Any
    done: Any


class Programs:
    """What is compiled to generate with a decoder.

    Attributes:
        compilations: programs compiled so far, or found in ``cache_dir``.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.folder = Folder(steps)
        self.compilations = 0
        self._known: dict[Any, Any] = {}
        self._types: dict[int, Any] = {}
        """Of what stands for weights, by its id: there are many, and each token that is streamed would ask."""

    def first(
        self,
        tokens: Any,
        lengths: Any,
        room: int,
        choose: Chooser,
        how: Mapping[str, Any],
        others: Any,
        layout: str = "",
    ) -> State:
        """The first call: prompts int[batch, count] of these lengths, in a cache with room for so many tokens.

        ``layout`` is what its cache is: "aligned", "apart", or "" for neither.
        """
        steps = self.steps

        def run(params: Any, tokens: Any, lengths: Any, how: Any, others: Any) -> State:
            cache = steps.empty_cache(tokens.shape[0], room, **({layout: True} if layout else {}))
            logits, cache = steps.prefill(params, cache, tokens, lengths, **others)
            return _begun(cache, logits, choose, how)

        return self._call(("first", room, choose, layout), run, (), tokens, lengths, how, others)

    def further(self, cache: Cache, tokens: Any, choose: Chooser, how: Mapping[str, Any], others: Any) -> State:
        """As ``first``, but the tokens, int[batch, count], come after those of a cache, which stays as it is."""
        steps = self.steps

        def run(params: Any, cache: Cache, tokens: Any, how: Any, others: Any) -> State:
            logits, cache = steps.extend(params, cache, tokens, **others)
            return _begun(cache, logits[:, -1], choose, how)

        return self._call(("further", choose), run, (), cache, tokens, how, others)

    def loop(self, state: State, limit: int, choose: Chooser, how: Mapping[str, Any], others: Any) -> State:
        """Generate until so many tokens are there or all texts have ended. The state given is used up."""
        step, handed = self.step(state.cache, state.last, others)

        def run(handed: Any, state: State, limit: Any, how: Any, others: Any) -> State:
            def more(state: State) -> Any:
                return (state.count < limit) & ~jnp.all(state.done)

            def body(state: State) -> State:
                fed = jnp.where(state.done, 0, state.last)  # padding may be no token of the model's
                logits, cache = step(handed, state.cache, fed, others)
                resting = state.cache.live
                if cache.aligned:  # everything has moved on
                    resting = jnp.pad(resting[:, 1:], ((0, 0), (0, 1)))
                live = jnp.where(state.done[:, None], resting, cache.live)
                return _chosen(replace(state, cache=replace(cache, live=live), logits=logits), choose, how)

            return lax.while_loop(more, body, state)

        return self.run(("loop", choose), run, (1,), handed, state, np.int32(limit), how, others)

    def step(self, cache: Cache, last: Any, others: Any) -> tuple[Callable[..., Any], Any]:
        """One step to be called in a program: from what stands for weights, and the other arguments."""

        def run(params: Any, cache: Cache, last: Any, others: Any) -> Any:
            return self.steps.step(params, cache, last, **others)

        return self._part(("step",), run, cache, last, others)

    def extend(self, cache: Cache, tokens: Any, others: Any) -> tuple[Callable[..., Any], Any]:
        """Some tokens at once, likewise."""

        def run(params: Any, cache: Cache, tokens: Any, others: Any) -> Any:
            return self.steps.extend(params, cache, tokens, **others)

        return self._part(("extend",), run, cache, tokens, others)

    def _call(self, key: Any, function: Any, donate: Sequence[int], *args: Any) -> Any:
        """The result of a function of the weights and these arguments, compiled."""
        call, handed = self._part(key, function, *args)
        return self.run(key, call, donate, handed, *args)

    def _part(self, key: Any, function: Any, *args: Any) -> tuple[Callable[..., Any], Any]:
        """A function of the weights to be called in a program, prepared once for the types of its other arguments."""
        full = (*key, _types(args))
        if full not in self._known:
            self._known[full] = self._prepared(full, function, *args)
            handed = self._known[full][1]
            self._types[id(handed)] = _types(handed)
        found: tuple[Callable[..., Any], Any] = self._known[full]
        return found

    def run(self, key: Any, function: Any, donate: Sequence[int], *args: Any, **fixed: Any) -> Any:
        """The result of a function of these arguments, compiled for their types; ``fixed`` ones go with the key."""
        weights = self._types.get(id(args[0])) or _types(args[0])
        full = ("run", *key, weights, _types(args[1:]))
        with compat.enable_x64():
            if full in self._known:
                return self._known[full](*args)
            self.compilations += 1
            jitted = jax.jit(partial(function, **fixed), donate_argnums=tuple(donate))
            self._known[full] = self._compiled(full, jitted, *args)
            result = jax.block_until_ready(self._known[full](*args))
        trim_heap()
        return result

    def _compiled(self, full: Any, jitted: Any, *args: Any) -> Callable[..., Any]:
        """A jitted function, from ``cache_dir`` where another process has compiled it."""
        if not self._optimizes or (path := self.folder.path(*full)) is None:
            return jitted
        if kept := self.folder.read(path):
            return unless_configured(kept.compiled, jitted)
        compiled, dumped = compiled_to_keep(jitted, *args)
        self.folder.write(path, None if dumped is None else Kept(None, None, dumped))
        return jitted if compiled is None else unless_configured(compiled, jitted)

    def _prepared(self, full: Any, function: Any, *args: Any) -> Any:
        """A function of the weights for a program of these arguments, optimised on a CPU, and what stands for them."""
        weights, warned = self.steps.weights, self.steps.model.settings.warned
        if not self._optimizes:
            return function, dict(weights)
        jitted = jax.jit(lambda _, *all: function(*all), static_argnums=0)
        path, before = self.folder.path("part", *full), len(warned)
        kept = self.folder.read(path)
        with compat.enable_x64():
            types = jax.tree.map(lambda v: jax.ShapeDtypeStruct(np.shape(v), v.dtype), args)
            options = Options(skip=frozenset({"fold_batchnorm"}), portable=path is not None)
            executable = Executable(jitted, None, weights.types, *types, options=options, kept=kept)
            handed = executable.hoisted(weights)
        if kept is None and len(warned) == before:  # else the next process would not be warned
            self.folder.write(path, executable.plan)

        def call(handed: Any, *args: Any) -> Any:
            return jax.tree.unflatten(executable.structure, executable.main(handed, jax.tree.leaves(args)))

        return call, handed

    @property
    def _optimizes(self) -> bool:
        weights = self.steps.weights
        return self.steps.model.settings.optimize and weights.on_one_cpu and compat.context_mesh().empty


def _begun(cache: Cache, logits: Any, choose: Chooser, how: Mapping[str, Any]) -> State:
    """The state behind the prompt, with the first token chosen."""
    batch = logits.shape[0]
    tokens, zeros = jnp.zeros((batch, cache.length), np.int32), jnp.zeros(batch, np.int32)
    return _chosen(State(cache, zeros, logits, tokens, np.int32(0), zeros, zeros > 0), choose, how)


def _chosen(state: State, choose: Chooser, how: Mapping[str, Any]) -> State:
    """The state with one more token: drawn where its text has not ended, and otherwise what pads it."""
    key = jax.random.fold_in(how["key"], state.count)
    logits = state.logits.astype(np.float32)
    last = how["sampling"](logits, key) if "sampling" in how else choose(logits, key)
    if np.shape(last) != state.done.shape or not jnp.issubdtype(last.dtype, np.integer):
        given = f"{getattr(last, 'dtype', type(last).__name__)} {np.shape(last)}"
        raise InputValueError(f"sampling gives {given}: a token for each text, integers {state.done.shape}")
    last = jnp.where(state.done, how["pad"], last.astype(np.int32))
    tokens = lax.dynamic_update_slice_in_dim(state.tokens, last[:, None], state.count, axis=1)
    return replace(
        state,
        last=last,
        tokens=tokens,
        count=state.count + 1,
        lengths=state.lengths + (~state.done).astype(np.int32),
        done=state.done | ends(tokens, state.count, how["endings"]),
    )


def ends(tokens: Any, place: Any, endings: Any) -> Any:
    """Which texts end at a place, by endings int32[n, m]."""
    size = endings.shape[1]
    behind = jnp.pad(tokens, ((0, 0), (size - 1, 0)), constant_values=NEVER)
    said = lax.dynamic_slice_in_dim(behind, place, size, axis=1)
    return jnp.any(jnp.all((said[:, None] == endings) | (endings == ANY), axis=2), axis=1)


def endings(stop: Sequence[Sequence[int]]) -> np.ndarray:
    """What ends a text, as one array: [n, m], n and m rounded up so that other endings are no other program.

    >>> endings([[5], [7, 8]])[:2, -2:].tolist()
    [[-1, 5], [7, 8]]
    """
    size = 1 << max(max(map(len, stop), default=0) - 1, 15).bit_length()
    rows = [[ANY] * (size - len(s)) + list(s) for s in stop]
    rows += [[NEVER] * size] * (-len(rows) % 4 or 4 * (not rows))
    return np.array(rows, np.int32)


def _types(args: Any) -> Any:
    leaves, structure = jax.tree.flatten(args)
    return structure, tuple((np.shape(v), str(v.dtype)) for v in leaves)
