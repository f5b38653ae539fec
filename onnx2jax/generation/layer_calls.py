"""Chooses whether a decoder's repeated layers are calls of one compiled program, rather than one program of them all.

A decoder in int4 of 1.1 billion parameters, 22 layers of 25 MB, on 2 cores: seconds until it has generated 16 tokens,
and ms a token later:

                                                  jax 0.10        jax 0.12
    one program, a loop over tokens on the device 22, 48 to 56    25, 76 to 84
    a call for each layer                          7, 50 to 62     7, 49 to 64

Dispatch competes with the computation for the cores: on jax 0.10, 4 to 12 % of a token, 10 to 25 % for layers of 10 MB,
and in float32 nothing. The 15 s of compiling pay for that up to some 3000 tokens. On jax 0.12 kernels inside of a loop
share a thread.

Tried on jax 0.10, times of asynchronous dispatch of each layer: waiting for each layer, or for every fourth: 1.05; two
layers a call: 1.04, eleven: 1.8 (XLA schedules long programs worse); a loop of one trip around each layer: 1.01; loops
over words unrolled: 20; not reading between tokens whether all texts have ended: 1.01; the dispatching thread under
Linux's SCHED_BATCH: 1.02, SCHED_IDLE: 0.98. ``scan_layers=True``, whose loop copies weights: 3.5.
"""

from __future__ import annotations

from typing import Final

from ..ir import layers
from ..ir.analysis import parameters
from ..model.model import Model
from ..runtime.params import device_of, is_cpu

LEAST_BYTES: Final = 20 << 20
"""Weights of a layer, which then takes 2 ms or more a token."""


def with_layer_calls(model: Model) -> Model:
    """The model with its repeated layers as calls where that pays, unless ``convert(scan_layers=)`` says how."""
    options = model.options
    if options.scan_layers is not None or options.skipped is None or model.placement is not None:
        return model
    weights = parameters(model.graph)
    if sum(v.nbytes for v in weights.values()) < 2 * LEAST_BYTES or not is_cpu(device_of(())):
        return model
    for run in layers.repeated(model.graph):
        if sum(weights[n].nbytes for n in run.columns if n in weights) >= LEAST_BYTES:
            return model.with_options(scan_layers="calls")
    return model
