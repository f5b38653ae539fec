"""Fails if a file runs slower than the same network by hand: ``python -m benchmarks.gate``, about two minutes.

Both are XLA programs in one process, so other load slows both, and their ratio is stable. Processor time
is the most stable: on two cores with a load of 8, two equal programs were within 0.95 and 1.04, by wall time within
0.93 and 1.15. So the limit is on processor time; wall time, which alone shows idle cores, has a wider
one. Networks below the limit are measured again with more rounds before they fail.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

from . import networks
from .harness import Call, compare
from .networks import Make
from .networks.transformers import bert
from .rivals import BY_HAND, OURS, rivals

LIMIT: Final = 0.9
"""The limit on the ratio of processor time. CI, whose machines are busy, uses a lower one to find broken passes."""
BY_THE_CLOCK: Final = 0.15
"""The limit on wall time is lower by this."""
ROUNDS: Final = (7, 21, 41)
GATED: Final[dict[str, Make]] = {
    "resnet50": networks.NETWORKS["resnet50"],
    "mobilenet_v2": networks.NETWORKS["mobilenet_v2"],
    "unet": networks.NETWORKS["unet"],
    "vit": networks.NETWORKS["vit"],
    "bert of 2 layers": partial(bert, layers=2, vocabulary=1000),
    "lstm": networks.NETWORKS["lstm"],
    "gru": networks.NETWORKS["gru"],
}


class Verdict(NamedTuple):
    """Speed relative to the network by hand, in processor and wall time."""

    work: float
    wall: float

    def slow(self, limit: float) -> bool:
        return self.work < limit or self.wall < limit - BY_THE_CLOCK


def judged(calls: dict[str, Call], limit: float = LIMIT) -> Verdict:
    """The median ratios within rounds, with more rounds while it is too slow."""
    for rounds in ROUNDS:
        compared = compare(calls, rounds=rounds, discard=0.02)  # nobody's threads spin
        verdict = Verdict(compared.work(OURS, BY_HAND), compared.paired(OURS, BY_HAND).median)
        if not verdict.slow(limit):
            break
    return verdict


def main(given: list[str] | None = None) -> int:
    """The number of networks below the limit."""
    parser = argparse.ArgumentParser("python -m benchmarks.gate", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("names", nargs="*", metavar="name", help=f"these alone: {', '.join(GATED)}")
    parser.add_argument("--limit", type=float, default=LIMIT, help="of processor time (default: %(default)s)")
    options, slow = parser.parse_args(given), 0
    for name in options.names or GATED:
        with TemporaryDirectory() as folder:
            verdict = judged(rivals(GATED[name](Path(folder), 1), (OURS, BY_HAND)), options.limit)
        slow += verdict.slow(options.limit)
        ratios = f"{verdict.work:5.2f} by processor time, {verdict.wall:5.2f} by the clock"
        print(f"{name:20} {ratios}{'   too slow' if verdict.slow(options.limit) else ''}", flush=True)
    return slow


if __name__ == "__main__":
    sys.exit(main())
