"""Fail where a file runs slower than the same network by hand: ``python -m benchmarks.gate``, about two minutes.

Both are XLA programs in one process, so what else the machine does slows both, and their ratio stays. It is judged by
the median ratio of processor time and of wall time, whichever is better: the first does not see that a core was taken
away, the second does not see threads that wait. A network below the limit is measured again with more rounds before
that counts.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from . import networks
from .harness import Call, compare
from .networks import Make
from .networks.transformers import bert
from .rivals import BY_HAND, OURS, rivals

LIMIT: Final = 0.9
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


def judged(calls: dict[str, Call]) -> float:
    """How many times as fast as by hand; more rounds as long as it is too slow."""
    ratio = 0.0
    for rounds in ROUNDS:
        compared = compare(calls, rounds=rounds, discard=0.02)  # nobody's threads spin
        ratio = max(compared.paired(OURS, BY_HAND).median, compared.work(OURS, BY_HAND))
        if ratio >= LIMIT:
            break
    return ratio


def main(given: list[str] | None = None) -> int:
    """The number of networks below the limit."""
    parser = argparse.ArgumentParser("python -m benchmarks.gate", description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("names", nargs="*", choices=[[], *GATED], help="these alone")
    slow = 0
    for name in parser.parse_args(given).names or GATED:
        with TemporaryDirectory() as folder:
            ratio = judged(rivals(GATED[name](Path(folder), 1), (OURS, BY_HAND)))
        slow += ratio < LIMIT
        print(f"{name:20} {ratio:5.2f} {'' if ratio >= LIMIT else f'below {LIMIT}'}", flush=True)
    return slow


if __name__ == "__main__":
    sys.exit(main())
