"""Chooses whether a decoder's repeated layers are calls of one compiled program, rather than one program of them all.

A decoder in int4 of 1.1 billion parameters, 22 layers of 25 MB, on 2 cores: seconds until it is ready with 16 tokens,
and ms a token:

                                                  jax 0.10      jax 0.12
    one program, a loop over tokens on the device 19.2, 48.5    18.7, 76
    a call for each layer                          7.3, 50.5     6.7, 49

Each call costs some 0.1 ms while the computation takes all cores. On jax 0.12 kernels inside of a loop share a thread.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ..ir import layers
from ..ir.analysis import parameters
from ..model.model import Model
from ..runtime.params import device_of, is_cpu

LEAST_BYTES: Final = 20 << 20
"""Weights of a layer, which then takes 2 ms or more a token."""


def with_layer_calls(model: Model) -> Model:
    """The model with its repeated layers as calls where that pays, unless ``convert(scan_layers=)`` says how."""
    settings = model.settings
    if settings.scan_layers is not None or not settings.optimize or model.placement is not None:
        return model
    weights = parameters(model.graph)
    if sum(v.nbytes for v in weights.values()) < 2 * LEAST_BYTES or not is_cpu(device_of(())):
        return model
    for run in layers.repeated(model.graph):
        if sum(weights[n].nbytes for n in run.columns if n in weights) >= LEAST_BYTES:
            return model._replace(replace(model.spec, settings=replace(settings, scan_layers="calls")))
    return model
