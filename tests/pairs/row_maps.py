"""Functions that rows of the matrix, and their items, go through."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pyarrow as pa

MARKER = re.compile("(<image>|<audio>|<video>)")


def loud(text: str) -> str:
    """A text in capitals, but for its markers."""
    return "".join(part if MARKER.fullmatch(part) else part.upper() for part in MARKER.split(text))


def shout(columns: dict[str, pa.Array], **_: Any) -> dict[str, pa.Array]:
    """Texts in capitals."""
    [texts] = columns.values()
    return {"text": pa.array([None if text is None else text.upper() for text in texts.to_pylist()], pa.string())}


def shout_around(columns: dict[str, pa.Array], **_: Any) -> dict[str, pa.Array]:
    """Texts in capitals, but for their markers."""
    [texts] = columns.values()
    return {"text": pa.array(map(loud, texts.to_pylist()), pa.string())}


def shout_inside(columns: dict[str, pa.Array], **_: Any) -> dict[str, pa.Array]:
    """What messages and lists say in capitals."""

    def shouted(held: Any) -> Any:
        if isinstance(held, dict):
            return {key: shouted(one) if key in ("content", "text") else one for key, one in held.items()}
        if isinstance(held, list):
            return [shouted(one) for one in held]
        return loud(held) if isinstance(held, str) else held

    [texts] = columns.values()
    made = [json.dumps([shouted(one) for one in json.loads(text)]) for text in texts.to_pylist()]
    return {"text": pa.array(made, pa.string())}


def doubled(columns: dict[str, pa.Array], **_: Any) -> dict[str, pa.Array]:
    """Each token twice as large."""
    [lists] = columns.values()
    return {"tokens": pa.array([[2 * token for token in tokens] for tokens in lists.to_pylist()], pa.list_(pa.int32()))}


def shifted(values: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Pixels with another level, or samples of another loudness."""
    if values.dtype == np.uint8:
        return values + random.integers(0, 256, dtype=np.uint8)
    return values * np.float32(random.uniform(0.5, 1.0))


for each in (shout, shout_around, shout_inside, doubled, shifted):
    each.version = 1  # type: ignore[attr-defined]
