"""Random rows of the pairwise matrix: three values that need not stand in one of its rows, the others at random.

    python -m tests.trials.triples --seed 1 --count 500 --out triples.json

In: a seed and a number of rows. Out: for each row what was compared, or how it failed, with the row itself. Must hold:
as tests/pairs: every tensor, the order, the ledger and the shares. A row may be refused by an error of torchmix, since
three values may be refused that are not as pairs; its words are kept. A run goes on where it stopped. Cost: half a
second of a processor a row.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.pairs.columns import COLUMNS, DEFAULTS, Row
from tests.pairs.covering import row_with
from tests.pairs.runner import run_row
from tests.support.trial import continued, trial_parser
from torchmix.errors import TorchmixError


def random_row(seed: int, number: int) -> Row:
    """A valid row: of every other number all columns are random, else three beside the default."""
    draw = random.Random(f"{seed}/{number}")
    while True:
        chosen = {name: draw.choice(COLUMNS[name]) for name in draw.sample(list(COLUMNS), 3)}
        row = row_with(chosen, draw if number % 2 == 0 else None)
        if row is not None:
            return row


def try_row(seed: int, number: int) -> dict[str, Any]:
    """Run one row."""
    row = random_row(seed, number)
    changed = {name: value for name, value in row.items() if value != DEFAULTS[name]}
    with tempfile.TemporaryDirectory() as name:
        try:
            return vars(run_row(row, Path(name)))
        except TorchmixError as error:
            return {"refused": f"{type(error).__name__}: {error}", "row": changed}
        except Exception as error:  # a trial goes on, and names what failed
            return {"failed": f"{type(error).__name__}: {error}", "row": changed}


def main() -> int:
    """Try the rows that are not in the file yet; 1 if one failed."""
    done = continued(trial_parser(__doc__, count=100, out="triples.json").parse_args(), try_row)
    failed = [key for key, one in done.items() if "failed" in one]
    refused = [key for key, one in done.items() if "refused" in one]
    print(f"{len(done)} rows, {len(refused)} refused, {len(failed)} failed: {failed[:9]}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
