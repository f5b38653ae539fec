"""Generation as one compiled loop on the device that feeds each token back and updates the caches in place.

Two programs are compiled: prefill with the choice of the first token, and the loop for the rest. The number of tokens,
sampling settings and stop sequences are traced arguments, so other values do not compile again.
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

from .. import compat, progress
from ..errors import InputValueError
from ..jaxpr.pipeline import Passes
from ..runtime.dispatch import DispatchCache, Signature, argument_types, signature_of
from ..runtime.executable import Executable, portable, traced_for
from ..runtime.jitted import persistent
from ..runtime.memory import trim_heap
from ..runtime.program_cache import Kept
from ..runtime.sections import sections_of
from .cache import Cache
from .program_folder import ProgramFolder
from .sampling import NO_CHOICE, NO_LOGITS, Choice, processed, undecided
from .steps import Steps

NO_TOKEN: Final = -2
"""In a stop sequence: matches no token."""
ANY_TOKEN: Final = -1
"""In a stop sequence: matches every token."""
NAMES: Final = {"prefill": "program for prompts", "loop": "loop", "resume": "program for continuations"}
"""Programs in messages about progress."""

Controls = Mapping[str, Any]
"""Traced arguments by name: those of ``as_choice``, ``stop``, ``pad``, ``prompts``, and further inputs, ``others``."""
Hoisted = tuple[Callable[..., Any], Any]
"""A function of hoisted weights and of arguments, and these weights."""
Name = tuple[Any, ...]
"""A program: a string, and what the program depends on but its arguments."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LoopState:
    """State of the decoding loop.

    Attributes:
        cache: KV caches of all tokens but the last.
        last: int32[batch], the last token of each text; NO_LOGITS or NO_CHOICE where there is none, which ends all.
        logits: [batch, vocabulary], from which ``last`` was chosen.
        tokens: int32[batch, room], the generated tokens.
        count: int32, the number of tokens generated so far, padding included.
        lengths: int32[batch], the number of tokens of each text, without padding.
        done: bool[batch], the texts that have ended.
        logprobs: float32[batch, room], the log-probabilities of the tokens; None if they are not wanted.
    """

    cache: Cache
    last: Any
    logits: Any
    tokens: Any
    count: Any
    lengths: Any
    done: Any
    logprobs: Any = None


def with_arrays(state: LoopState, **arrays: np.ndarray) -> LoopState:
    """The state with other arrays, each on the devices of the one that it replaces, so that no program is new."""
    old = {n: getattr(state, n) for n in arrays}
    places = {n: v.sharding if v.committed else None for n, v in old.items()}
    return replace(state, **{n: jax.device_put(v, places[n]) for n, v in arrays.items()})


class Programs:
    """A decoder's compiled programs.

    Attributes:
        compilations: number of programs compiled so far, or loaded from ``cache_dir``.
    """

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.folder = ProgramFolder(steps)
        self.compilations = 0
        self._parts: DispatchCache[Hoisted] = DispatchCache()
        self._programs: DispatchCache[Any] = DispatchCache()

    def prefill(
        self, tokens: Any, lengths: Any, room: int, layout: str, choice: Choice, controls: Controls
    ) -> LoopState:
        """Prefills a cache of length ``room`` with prompts int[batch, count] and chooses the first token.

        ``layout`` of the cache: "aligned", "apart", or "" for neither.
        """
        steps = self.steps

        def prefill(params: Any, tokens: Any, lengths: Any, controls: Controls) -> LoopState:
            cache = steps.empty_cache(tokens.shape[0], room, **({layout: True} if layout else {}))
            logits, cache = steps.prefill(params, cache, tokens, lengths, **controls["others"])
            return _initial(cache, logits, choice, controls)

        return self._call(("prefill", room, choice, layout), prefill, tokens, lengths, controls)

    def resume(self, cache: Cache, tokens: Any, choice: Choice, controls: Controls) -> LoopState:
        """As ``prefill``, with tokens int[batch, count] appended to an existing cache, which is not donated."""

        def resume(params: Any, cache: Cache, tokens: Any, controls: Controls) -> LoopState:
            logits, cache = self._extend(params, cache, tokens, controls["others"])
            return _initial(cache, logits[:, -1], choice, controls)

        return self._call(("resume", choice), resume, cache, tokens, controls)

    def loop(self, state: LoopState, limit: int, choice: Choice, controls: Controls) -> LoopState:
        """Generates until there are ``limit`` tokens or all texts have ended. Donates the state."""

        def token(params: Any, state: LoopState, controls: Controls) -> LoopState:
            return _next(partial(self._step, params), state, choice, controls)

        def loop() -> Hoisted:
            step, weights = self.step(state.cache, state.last, controls["others"])

            def run(weights: Any, state: LoopState, limit: Any, controls: Controls) -> LoopState:
                def more(state: LoopState) -> Any:
                    return (state.count < limit) & ~jnp.all(state.done)

                def body(state: LoopState) -> LoopState:
                    return _next(partial(step, weights), state, choice, controls)

                return lax.while_loop(more, body, state)

            return run, weights

        if (call := self._by_layers(("token", choice), token, state, controls, donate=True)) is not None:
            for _ in range(int(state.count), limit):
                if np.asarray(state.done).all():
                    break
                state = call(state, controls)
            return state
        result: LoopState = self.run(("loop", choice), loop, state, np.int32(limit), controls, donate=True)
        return result

    def step(self, cache: Cache, last: Any, others: Any) -> Hoisted:
        """``Steps.step`` for use in a loop of a program; call as ``step(weights, cache, last, others)``."""
        return self._part(("step",), self._step, cache, last, others, in_loop=True)

    def extend(self, cache: Cache, tokens: Any, others: Any) -> Hoisted:
        """``Steps.extend`` for use in a loop of a program, as ``step``."""
        return self._part(("extend",), self._extend, cache, tokens, others, in_loop=True)

    def run(self, name: Name, program: Callable[[], Hoisted], *args: Any, donate: bool = False) -> Any:
        """The result of a program, compiled for the signature of its arguments and bound to its hoisted weights.

        Args:
            name: of the program, with all that it depends on but its arguments.
            program: returns it, when it is to be compiled.
            *args: pytrees of arrays.
            donate: whether the first of them is donated.
        """
        if compat.rejects_values():  # empty slots may hold any, and whoever chooses a token checks the logits
            with compat.any_values():
                return self.run(name, program, *args, donate=donate)
        key = self._signature(name, args)
        with compat.enable_x64():
            if (bound := self._programs.get(key)) is not None:
                return bound(*args)
            with progress.stage(f"compiling the decoder's {NAMES.get(name[0], name[0])}"):
                bound = self._programs.program(key, lambda: self._compiled(name, program, args, donate))
                result = jax.block_until_ready(bound(*args))
        trim_heap()
        return result

    def _step(self, params: Any, cache: Cache, last: Any, others: Any) -> Any:
        return self.steps.step(params, cache, last, **others)

    def _extend(self, params: Any, cache: Cache, tokens: Any, others: Any) -> Any:
        return self.steps.extend(params, cache, tokens, **others)

    def _call(self, name: Name, function: Any, *args: Any) -> Any:
        """The result of a function of the weights and these arguments."""
        if (call := self._by_layers(name, function, *args)) is not None:
            return call(*args)
        return self.run(name, lambda: self._part(name, function, *args), *args)

    def _signature(self, name: Name, args: Any) -> Signature | None:
        return signature_of(name, args, self.steps.weights.device)

    def _by_layers(self, name: Name, function: Any, *args: Any, donate: bool = False) -> Callable[..., Any] | None:
        """A function of the weights as sections bound to these; None if it is compiled as one program."""
        if self.steps.model.settings.scan_layers != "calls" or compat.checks_values() or self._target is None:
            return None
        key = self._signature(("layers", *name), args)
        call: Callable[..., Any] | None = self._programs.program(key, lambda: self._sections(function, args, donate))
        return call

    def _sections(self, function: Any, args: Any, donate: bool) -> Callable[..., Any] | None:
        weights, target = self.steps.weights, self._target
        with compat.enable_x64(), progress.stage("compiling the decoder's layers"):
            types = _types(args)
            donated = range(len(jax.tree.leaves(types[0]))) if donate else ()
            options = Passes(compat.lowering_platform(target), self.steps.model.settings.skip)
            traced = traced_for(options, jax.jit(function), weights.types, *types)
            sections = sections_of(traced, sorted(weights.types), target, options, donated, self.folder.store)
            if sections is None:
                return None
            bound = sections.bind(weights, (), (), as_numpy=False)
        self.compilations += 1
        return lambda *args: jax.tree.unflatten(sections.structure, bound.call(jax.tree.leaves(args)))

    def _compiled(self, name: Name, program: Callable[[], Hoisted], args: Any, donate: bool) -> Callable[..., Any]:
        """A program bound to its weights: compiled, or loaded from ``cache_dir`` if another process has stored it."""
        self.compilations += 1
        function, weights = program()
        jitted = jax.jit(function, donate_argnums=1 if donate else ())
        types = argument_types(weights), argument_types(args)
        entry = None if self._target is None else self.folder.path("run", *name, *types)
        kept = self.folder.read(entry)
        compiled = kept.compiled if kept else None if entry is None else portable(jitted.lower(weights, *args))
        if kept is None and compiled is not None and (code := compat.dump_compiled(compiled)) is not None:
            self.folder.write(entry, Kept(None, None, code))
        # Without an entry it is traced in each process, but not compiled again.
        return partial(compiled or persistent(jitted, self.folder.store), weights)

    def _part(self, name: Name, function: Any, *args: Any, in_loop: bool = False) -> Hoisted:
        """A function with hoisted weights in place of the weights, and these; once per signature of its arguments.

        ``in_loop``: the function is called inside a loop on the device.
        """
        return self._parts.program(self._signature(name, args), lambda: self._hoist(name, function, args, in_loop))

    def _hoist(self, name: Name, function: Any, args: Any, in_loop: bool) -> Hoisted:
        """A function of the weights optimised for their device, and its hoisted parameter-only subexpressions."""
        weights, warned = self.steps.weights, self.steps.model.settings.warned
        if (target := self._target) is None:
            return function, dict(weights)

        def part(_: Any, *args: Any) -> Any:
            return function(*args)

        part.__name__ = f"decoder_{name[0]}"
        jitted = jax.jit(part, static_argnums=0)
        path, before = self.folder.path("part", *name, argument_types(args)), len(warned)
        kept = self.folder.read(path)
        with compat.enable_x64():
            # Kernels inside of a loop share a thread, unrolled or not.
            skip = self.steps.model.settings.skip | {"fold_batchnorm", *(["unroll_loops"] if in_loop else [])}
            portable = path is not None and self.folder.is_portable
            options = Passes(compat.lowering_platform(target), skip, portable=portable)
            executable = Executable(jitted, None, weights.types, *_types(args), options=options, kept=kept)
            hoisted = executable.hoisted(weights)
        if kept is None and len(warned) == before:  # a loaded program would not repeat the warning
            self.folder.write(path, executable.plan)

        def call(hoisted: Any, *args: Any) -> Any:
            return jax.tree.unflatten(executable.structure, executable.main(hoisted, jax.tree.leaves(args)))

        return call, hoisted

    @property
    def _target(self) -> jax.Device | None:
        """The device for which programs are optimised; None where they stay as they were traced."""
        optimizes = self.steps.model.settings.optimize and compat.context_mesh().empty
        return self.steps.weights.device if optimizes else None


def _types(args: Any) -> Any:
    return jax.tree.map(lambda v: jax.ShapeDtypeStruct(np.shape(v), v.dtype), args)


def _initial(cache: Cache, logits: Any, choice: Choice, controls: Controls) -> LoopState:
    """The state after the prompt, with the first token chosen."""
    batch = logits.shape[0]
    tokens, zeros = jnp.zeros((batch, cache.length), np.int32), jnp.zeros(batch, np.int32)
    state = LoopState(cache, zeros, logits, tokens, np.int32(0), zeros, zeros > 0)
    if choice.logprobs:
        state = replace(state, logprobs=jnp.zeros(tokens.shape, np.float32))
    return _append_token(state, choice, controls)


def _next(step: Callable[..., Any], state: LoopState, choice: Choice, controls: Controls) -> LoopState:
    """The state with one more token for each text; ``step`` is ``Steps.step`` without parameters."""
    fed = jnp.where(state.done, 0, state.last)  # pad may be outside the vocabulary
    logits, cache = step(state.cache, fed, controls["others"])
    idle = state.cache.live
    if cache.aligned:  # right-aligned tokens moved left by one slot
        idle = jnp.pad(idle[:, 1:], ((0, 0), (0, 1)))
    live = jnp.where(state.done[:, None], idle, cache.live)
    return _append_token(replace(state, cache=replace(cache, live=live), logits=logits), choice, controls)


def _append_token(state: LoopState, choice: Choice, controls: Controls) -> LoopState:
    """The state with one more token for each text: sampled, or ``pad`` if the text has ended."""
    key = jax.random.fold_in(controls["key"], state.count)
    raw = state.logits.astype(np.float32)
    logits = raw
    if "prompts" in controls:
        written = jnp.concatenate([controls["prompts"], state.tokens], axis=1)
        past = lax.dynamic_slice_in_dim(written, state.count, state.tokens.shape[1], axis=1)
        logits = processed(choice, past, raw, controls.get("repetition_penalty"))
    last = controls["sampling"](logits, key) if "sampling" in controls else choice.sampler(logits, key)
    if np.shape(last) != state.done.shape or not jnp.issubdtype(last.dtype, np.integer):
        returned = f"{getattr(last, 'dtype', type(last).__name__)} {np.shape(last)}"
        raise InputValueError(f"sampling returns {returned}, not one token per text: integers {state.done.shape}")
    lost = jnp.where(undecided(raw), np.int32(NO_LOGITS), jnp.where(undecided(logits), np.int32(NO_CHOICE), 0))
    lost = jnp.where(state.done, 0, lost)
    last = jnp.where(state.done, controls["pad"], jnp.where(lost < 0, lost, last.astype(np.int32)))
    tokens = lax.dynamic_update_slice_in_dim(state.tokens, last[:, None], state.count, axis=1)
    if choice.logprobs:
        chosen = jnp.where(state.done, 0, last)[:, None]
        likely = jnp.where(state.done[:, None], 0, jnp.take_along_axis(jax.nn.log_softmax(raw), chosen, axis=1))
        logprobs = lax.dynamic_update_slice_in_dim(state.logprobs, likely, state.count, axis=1)
        state = replace(state, logprobs=logprobs)
    return replace(
        state,
        last=last,
        tokens=tokens,
        count=state.count + 1,
        lengths=state.lengths + (~state.done).astype(np.int32),
        done=state.done | jnp.any(lost < 0) | matches_stop(tokens, state.count, controls["stop"]),
    )


def matches_stop(tokens: Any, index: Any, stop: Any) -> Any:
    """bool[batch]: whether a stop sequence, a row of int32[n, m], ends at ``index`` in each row of tokens."""
    size = stop.shape[1]
    padded = jnp.pad(tokens, ((0, 0), (size - 1, 0)), constant_values=NO_TOKEN)
    latest = lax.dynamic_slice_in_dim(padded, index, size, axis=1)
    return jnp.any(jnp.all((latest[:, None] == stop) | (stop == ANY_TOKEN), axis=2), axis=1)


def stop_array(stop: Sequence[Sequence[int]]) -> np.ndarray:
    """Stop sequences as an array int32[n, m], with n and m rounded up so that most share one compiled program.

    >>> stop_array([[5], [7, 8]])[:2, -2:].tolist()
    [[-1, 5], [7, 8]]
    """
    size = 1 << max(max(map(len, stop), default=0) - 1, 15).bit_length()
    rows = [[ANY_TOKEN] * (size - len(s)) + list(s) for s in stop]
    rows += [[NO_TOKEN] * size] * (-len(rows) % 4 or 4 * (not rows))
    return np.array(rows, np.int32)
