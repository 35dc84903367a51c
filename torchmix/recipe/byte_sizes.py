"""Sizes in bytes, as text: `64MiB`.

In: text or a number, as a recipe has it; or a number for a person to read. Out: a whole number of bytes; or text. Must
hold: a size that is read is never rounded. Cost: none.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from torchmix.errors import RecipeError

BYTES_OF_UNIT = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
BYTES_OF_UNIT |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@lru_cache(maxsize=64)
def parse_bytes(size: str | int, *, where: str) -> int:
    """Number of bytes of a size.

    Args:
        size: `64MiB`, `1GiB`, `512KiB` (powers of 1024), `100MB` (powers of 1000), `1.5GiB`, or plain bytes.
        where: Path of keys of the value, for the error.

    Raises:
        RecipeError: Not a size, not a whole number of bytes, or less than 1 byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d{1,9})?)\s*([A-Za-z]*)", str(size).strip(), re.ASCII)
    unit = {name.lower(): name for name in BYTES_OF_UNIT}.get(match[2].lower()) if match else None
    if match is None or unit is None or len(match[1]) > 30:
        raise RecipeError(f"{size!r} is not a size, as 64MiB, 1GiB, 100MB or a number of bytes", where)
    num_bytes = Fraction(match[1]) * BYTES_OF_UNIT[unit]
    if num_bytes.denominator != 1 or not 1 <= num_bytes < 2**63:
        raise RecipeError(f"{size!r} is not a whole number of bytes from 1 to 2**63 - 1", where)
    return int(num_bytes)


def bytes_text(num_bytes: float) -> str:
    """A size in the largest unit that leaves at least one: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"
