"""Mutated files: check and convert agree on each, and neither crashes nor hangs."""

from __future__ import annotations

import random
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

import onnx2jax
from onnx2jax.errors import OnnxError, UnsupportedError
from tests.conformance import test_annotations as annotations
from tests.conformance import test_devices as devices
from tests.conformance import test_functions as functions
from tests.conformance import test_scopes as scopes
from tests.conformance import test_types as types
from tests.support.cases import RELU, parse
from tests.support.helpers import assert_on_purpose

SECONDS = 5
"""Processor time for one file, a thousand times that of most files."""


def seeds() -> list[bytes]:
    """Small models that cover much of the format."""
    loop = scopes.loop(scopes.SCANNED, outputs="y, z", head="float[2] y, float[N, 2] z")
    protos: list[Any] = [
        parse(functions.CALL + functions.INNER_IF),
        parse(loop),
        parse(scopes.branches("t () => (float[2] e) { e = Add (x, w) }")),
        annotations.training(),
        devices.divided(RELU, [(0, 2)]),
        *(types.typed(kind) for kind in types.TYPES.values()),
        *(types.stored(code, [4], raw_data=bytes(types.ELEMENT_TYPES[code].bits // 2)) for code in (1, 9, 22, 25)),
    ]
    return [proto.SerializeToString() for proto in protos]


def mutant(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """A file with a few bytes changed, repeated, moved, or taken from another."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        at, length = rng.randrange(len(changed)), rng.randrange(1, 12)
        source = rng.randrange(len(other))
        match rng.randrange(6):
            case 0:
                changed[at] = rng.randrange(256)
            case 1:
                changed[at] ^= 1 << rng.randrange(8)
            case 2:
                changed[at] = rng.choice([0, 1, 2, 127, 128, 255])
            case 3:
                changed[at] = (changed[at] + rng.choice([-1, 1])) % 256
            case 4:
                changed[at : at + length] = other[source : source + length]
            case 5:
                changed[at:at] = changed[at : at + length]
    return bytes(changed)


def answers(data: bytes) -> None:
    """The outcomes of check and convert for a file, asserted to agree."""
    report = onnx2jax.check(data)
    try:
        onnx2jax.convert(data)
    except UnsupportedError as e:
        assert_on_purpose(e)
    except OnnxError as e:
        assert_on_purpose(e)
        assert not report.ok, f"convert refuses what check finds right: {e}"


@pytest.fixture
def alarm() -> Iterator[None]:
    """Interrupts a call that hangs."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"no answer within {SECONDS} seconds of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


@pytest.mark.skipif(not hasattr(signal, "SIGPROF"), reason="stops hanging calls by a signal")
@pytest.mark.rule("MV-12")
@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("count", [2000, pytest.param(100_000, marks=pytest.mark.long)])
def test_mutated_files_are_accepted_or_raise_our_errors(count: int) -> None:
    rng, originals = random.Random(count), seeds()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(count):
            data = mutant(rng, rng.choice(originals), rng.choice(originals))
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                answers(data)
            except BaseException as e:
                e.add_note(f"the file: {data!r}")
                raise
