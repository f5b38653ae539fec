"""Counts from the text of optimised HLO, as XLA writes it for TPU, CUDA and CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from onnx2jax.model.devices import hlo

TPU = """HloModule jit_f, is_scheduled=true

%fused_computation (param_0: f32[8,128]) -> bf16[8,128] {
  %param_0 = f32[8,128]{1,0:T(8,128)S(1)} parameter(0)
  ROOT %convert.1 = bf16[8,128]{1,0:T(8,128)(2,1)} convert(%param_0)
}

%body (arg: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %arg = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%arg), index=1
  %fusion.2 = f32[8,128]{1,0:T(8,128)} fusion(%x), kind=kLoop, calls=%fused_computation, metadata={op_name="jit(f)/node 3/mul"}, backend_config={"estimated_cycles":"50"}
  ROOT %tuple = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%i, %fusion.2)
}

%condition (arg: (s32[], f32[8,128])) -> pred[] {
  %bound = s32[] constant(7)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

ENTRY %main (a: f32[8,128], b: s4[64]) -> bf16[8,128] {
  %a = f32[8,128]{1,0:T(8,128)} parameter(0)
  %b = s4[64]{0} parameter(1)
  %copy-start.1 = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%a)
  %copy-done.1 = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%copy-start.1)
  %convert.5 = s8[64]{0} convert(%b)
  %init = (s32[], f32[8,128]) tuple(%zero, %copy-done.1)
  %while.3 = (s32[], f32[8,128]) while(%init), condition=%condition, body=%body%TRIPS%
  %y = f32[8,128]{1,0:T(8,128)} get-tuple-element(%while.3), index=1
  ROOT %fusion.9 = bf16[8,128]{1,0:T(8,128)(2,1)} fusion(%y), kind=kLoop, calls=%fused_computation, metadata={op_name="jit(f)/node 4/convert"}, backend_config={"estimated_cycles":"30"}
}
"""  # noqa: E501


@pytest.mark.parametrize(
    ("known", "trips"), [("", 7), (', backend_config={"known_trip_count":{"n":"5"}}', 5)], ids=["bound", "known"]
)
def test_loops_count_by_their_trips(known: str, trips: int) -> None:
    found = hlo.count(TPU.replace("%TRIPS%", known))
    array = 8 * 128 * 4
    # The loop's kernel reads and writes the array; the last one writes half; 64 numbers of 4 bits become 8.
    assert found.bytes == trips * 2 * array + (array + array // 2) + (32 + 64)
    assert found.kernels == trips + 2
    assert found.cycles == trips * 50 + 30
    assert found.cycles_by_scope == {"jit(f)/node 3/mul": trips * 50, "jit(f)/node 4/convert": 30}


def test_a_loop_inside_a_loop_counts_by_the_trips_of_both() -> None:
    """Seven times in each of the three trips of the outer loop."""
    outer = """%outer (arg: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %arg = (s32[], f32[8,128]) parameter(0)
  ROOT %while.1 = (s32[], f32[8,128]) while(%arg), condition=%condition, body=%body
}

ENTRY"""
    trips = 'body=%outer, backend_config={"known_trip_count":{"n":"3"}}'
    found = hlo.count(TPU.replace("body=%body%TRIPS%", trips).replace("ENTRY", outer))
    assert (found.kernels, found.cycles) == (3 * 7 + 2, 3 * 7 * 50 + 30)


def test_one_branch_of_a_conditional_counts() -> None:
    text = """
%one (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %n = f32[4]{0} negate(%p)
}

%two (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %n = f32[4]{0} negate(%p)
}

ENTRY %main (a: f32[4], i: s32[]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %c = f32[4]{0} conditional(%i, %a, %a), branch_computations={%one, %two}
}
"""
    assert (hlo.count(text).kernels, hlo.count(text).bytes) == (1, 32)


CACHE, ROW = 8 * 128 * 64 * 4, 8 * 64 * 4


def _counted(function: Callable[..., Any], donate: tuple[int, ...], *arguments: Any) -> int:
    return hlo.count(jax.jit(function, donate_argnums=donate).lower(*arguments).compile().as_text() or "").bytes


def test_an_update_in_place_counts_the_slice() -> None:
    def step(cache: Any, x: Any, i: Any) -> Any:
        return lax.dynamic_update_slice(cache, jnp.tanh(x), (0, i, 0))

    arguments = jnp.ones((8, 128, 64)), jnp.ones((8, 1, 64)), jnp.int32(3)
    assert _counted(step, (0,), *arguments) == 2 * ROW + 4
    # Without donation the cache is copied before.
    assert _counted(step, (), *arguments) == 2 * CACHE + 2 * ROW + 4


SLICED = """HloModule jit_g, is_scheduled=true

%fused_computation (param_0: f32[1000,8], param_1: s32[]) -> f32[1,8] {
  %param_0 = f32[1000,8]{1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %bitcast.1 = f32[1000,8]{1,0} bitcast(%param_0)
  %dynamic-slice.1 = f32[1,8]{1,0} dynamic-slice(%bitcast.1, %param_1, %zero), dynamic_slice_sizes={1,8}
  ROOT %multiply.1 = f32[1,8]{1,0} multiply(%dynamic-slice.1, %dynamic-slice.1)
}

ENTRY %main (table: f32[1000,8], i: s32[]) -> f32[1,8] {
  %table = f32[1000,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %gather.1 = f32[1,8]{1,0} gather(%table, %i), offset_dims={1}
  ROOT %fusion.1 = f32[1,8]{1,0} fusion(%table, %i), kind=kLoop, calls=%fused_computation
}
"""


def test_of_operands_that_are_sliced_the_slices_count() -> None:
    """In a gather by itself, and in a fusion: an index is read, a row read and written."""
    assert hlo.count(SLICED).bytes == 2 * (4 + 2 * 32)
    whole = SLICED.replace("multiply(%dynamic-slice.1, %dynamic-slice.1)", "multiply(%dynamic-slice.1, %bitcast.1)")
    assert hlo.count(whole).bytes == (4 + 2 * 32) + (4 + 32000 + 32)


def test_a_kernel_without_an_estimate_has_no_cycles() -> None:
    text = TPU.replace("%TRIPS%", "").replace('"estimated_cycles":"30"', f'"estimated_cycles":"{2**64 - 1}"')
    assert hlo.count(text).cycles == 7 * 50


def test_several_updates_of_a_loop_count_their_slices() -> None:
    def steps(cache: Any, x: Any) -> Any:
        return lax.fori_loop(0, 50, lambda i, c: lax.dynamic_update_slice(c, c[:, :1] * 0.5 + x, (0, i, 0)), cache)

    found = _counted(steps, (0,), jnp.ones((8, 128, 64)), jnp.ones((8, 1, 64)))
    assert 50 * 2 * ROW < found < 50 * (CACHE + 5 * ROW)


FUSED = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%second (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] bitcast(%b)
}

%inner (p: f32[1000,64], i: s32[3], u: f32[3,64]) -> f32[1000,64] {
  %u = f32[3,64] parameter(2)
  %i = s32[3] parameter(1)
  %p = f32[1000,64] parameter(0)
  ROOT %s = f32[1000,64] scatter(%p, %i, %u), update_window_dims={1}, to_apply=%COMBINER
}

%outer (i: s32[3], p: f32[1000,64], q: f32[64000], u: f32[3,64]) -> (f32[1000,64], f32[64000]) {
  %i = s32[3] parameter(0)
  %p = f32[1000,64] parameter(1)
  %q = f32[64000] parameter(2)
  %u = f32[3,64] parameter(3)
  %n = s32[] constant(4)
  %old = f32[64] dynamic-slice(%q, %n), dynamic_slice_sizes={64}
  %s = f32[1000,64] fusion(%p, %i, %u), kind=kCustom, calls=%inner
  %d = f32[64000] dynamic-update-slice(%q, %old, %n)
  ROOT %t = (f32[1000,64], f32[64000]) tuple(%s, %d)
}

ENTRY %main (p: f32[1000,64], q: f32[64000], i: s32[3], u: f32[3,64]) -> (f32[1000,64], f32[64000]) {
  %p = f32[1000,64] parameter(0)
  %q = f32[64000] parameter(1)
  %i = s32[3] parameter(2)
  %u = f32[3,64] parameter(3)
  ROOT %f = (f32[1000,64], f32[64000]) fusion(%i, %p, %q, %u), kind=kLoop, calls=%outer
}
"""


@pytest.mark.parametrize(("combiner", "times"), [("second", 1), ("add", 2)])
def test_updates_inside_of_fusions(combiner: str, times: int) -> None:
    """A scatter in a fusion within, which reads what it adds to, and a slice that is read and written back."""
    rows = 3 * 64 * 4
    assert hlo.count(FUSED.replace("COMBINER", combiner)).bytes == 3 * 4 + rows + times * rows + 2 * 64 * 4


@pytest.mark.parametrize(
    ("target", "workspace"), [("__cublas$lt$matmul", 0), ("__cudnn$convForward", 0), ("my_kernel", 4096)]
)
def test_the_workspace_of_a_library_is_not_moved(target: str, workspace: int) -> None:
    text = f"""ENTRY %main (a: f32[8,16], b: f32[16,4]) -> f32[8,4] {{
  %a = f32[8,16]{{1,0}} parameter(0)
  %b = f32[16,4]{{1,0}} parameter(1)
  %y = (f32[8,4]{{1,0}}, s8[4096]{{0}}) custom-call(%a, %b), custom_call_target="{target}"
  ROOT %z = f32[8,4]{{1,0}} get-tuple-element(%y), index=0
}}"""
    assert hlo.count(text).bytes == (8 * 16 + 16 * 4 + 8 * 4) * 4 + workspace


def test_a_program_of_this_machine() -> None:
    """Kernels of XLA:CPU: one product, and what is fused behind it."""
    compiled = jax.jit(lambda a, b: jnp.tanh(a @ b) + 1).lower(jnp.ones((64, 32)), jnp.ones((32, 16))).compile()
    found = hlo.count(compiled.as_text() or "")
    assert found.kernels >= 2
    assert found.bytes >= 4 * (64 * 32 + 32 * 16 + 64 * 16 + 2 * 64 * 16)


def test_text_without_an_entry() -> None:
    assert hlo.count("") == hlo.Counts()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%a = (f32[2]{0}, bf16[4,2]{1,0}) all-reduce(%b, %c), channel_id=1", [("all-reduce", 24)]),
        ("%a = (f32[2]{0}, f32[8]{0}) all-gather-start(%b), dimensions={0}", [("all-gather", 32)]),
        (
            "%a = ((f32[2]{0}, bf16[1,3]{1,0}), (f32[8]{0}, /*index=3*/bf16[4,3]{1,0})) all-gather-start(%b, %c)",
            [("all-gather", 56)],
        ),
        ("%a = (f32[2]{0}, f32[8]{0}) all-reduce-start(%b, %c), channel_id=1", [("all-reduce", 40)]),
        ("%a = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%b)", [("collective-permute", 32)]),
        ("%a = f32[8]{0} all-gather-done(%b)", []),
        ("ROOT %a = pred[] all-reduce(%b)", [("all-reduce", 1)]),
        ("%a = f32[2]{0} add(%all-reduce.1, %all-to-all)", []),
    ],
)
def test_collectives_are_parsed_from_hlo(line: str, expected: list[tuple[str, int]]) -> None:
    assert [(c.kind, c.bytes) for c in hlo.collectives(line)] == expected
