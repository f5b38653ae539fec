"""Measures how many faults the tests find.

python -m tests.planted --check                          # whether all faults still apply
python -m tests.planted --out results.json               # the tests of `make test` against all faults
python -m tests.planted --out results.json NAME...       # against some; --rooms ops ir
python -m tests.planted --marks "extended and not long and not zoo"   # the tests of `make test-extended`
python -m tests.planted --tree FOLDER                    # those of another checkout
python -m tests.planted --table OLD.json TEST.json EXTENDED.json      # a Markdown table of three such files

Faults that the file of --out has a result for are not measured again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from .faults import ROOT, Fault, copied, load, problems
from .measure import Suite, nearest, together
from .table import Results, table

MAKE_TEST: Final = "not extended and not long and not zoo"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 1 if faults do not apply."""
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="faults; all where none is named")
    parser.add_argument("--check", action="store_true", help="list the faults that no longer apply")
    parser.add_argument("--table", nargs=3, type=Path, metavar="JSON", help="a table of three files of results")
    parser.add_argument("--rooms", nargs="+", metavar="ROOM", help="faults in these packages alone")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout (default: this one)")
    parser.add_argument("--marks", default=MAKE_TEST, help="the tests, as pytest -m (default: %(default)s)")
    parser.add_argument("--first", type=Path, metavar="JSON", help="begin with the test files that found faults there")
    parser.add_argument("--out", type=Path, help="a JSON file of results, which is continued")
    arguments = parser.parse_args(argv)
    faults = load()
    if unknown := {*arguments.names} - {f.name for f in faults}:
        parser.error(f"there is no fault {', '.join(sorted(unknown))}")
    if arguments.table:
        print("\n".join(table(faults, [json.loads(path.read_text()) for path in arguments.table])))
        return 0
    bad = problems(faults, arguments.tree)
    for name, reason in bad.items():
        print(f"{name}: {reason}")
    if arguments.check:
        kinds, rooms = (Counter(getattr(f, field) for f in faults) for field in ("kind", "room"))
        print(f"{len(faults)} faults, {len(bad)} of which do not apply", dict(rooms), dict(kinds), sep="\n")
        return 1 if bad else 0
    chosen = [f for f in faults if f.name not in bad and (f.name in arguments.names or not arguments.names)]
    chosen = [f for f in chosen if f.room in (arguments.rooms or [f.room])]
    _measure(chosen, arguments)
    return 1 if bad else 0


def _measure(faults: Sequence[Fault], arguments: argparse.Namespace) -> None:
    out: Path | None = arguments.out
    results: Results = json.loads(out.read_text()) if out is not None and out.exists() else {}
    before: Results = json.loads(arguments.first.read_text()) if arguments.first else {}
    left = [fault for fault in faults if fault.name not in results or fault.name in arguments.names]

    def keep(fault: Fault, test: str | None) -> None:
        results[fault.name] = test
        print(f"{fault.name}: {test or 'survives'}", flush=True)
        if out is not None:
            out.write_text(json.dumps(results, indent=1))

    with copied(arguments.tree.resolve()) as copy:
        suite = Suite(copy, arguments.marks)
        for fault in [*left]:
            file = (before.get(fault.name) or "").partition("::")[0]
            if (copy / file).is_file() and (test := suite.first_failure(fault, [file])):
                keep(fault, test)
                left.remove(fault)
        for group in together(left, copy):
            failed = suite.failures(group)
            print(f"{len(group)} faults at once: {len(failed)} tests fail", flush=True)
            for fault in group:
                keep(fault, suite.first_failure(fault, nearest(fault, failed)))
    if unreliable := [test for test, passes in suite.reliable.items() if not passes]:
        print(f"tests that fail without a fault: {unreliable}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
