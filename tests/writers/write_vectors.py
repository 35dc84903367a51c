"""The steps and states of docs/vectors.json, made again by the second implementation, where the order changes.

    python -m tests.writers.write_vectors

In: `docs/vectors.json`, whose runs say what is planned. Out: the same file with other steps, digests and state bytes;
the package takes no part. Must hold: without a change of the second implementation the file stays as it is.
"""

from __future__ import annotations

import hashlib
import json
import struct
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from tests.support.book_jobs import BookJob, job_of_run, streams_of_run
from tests.support.book_order import BookSource
from tests.support.book_steps import steps

FILE = Path(__file__).parents[2] / "docs" / "vectors.json"
WIDTH = 120
DIGESTS = ("order_digest", "plan_digest")
"""What is bytes in a state, and hex in the vectors; columns are lists of numbers there."""


def text_of(value: Any, indent: int = 0, used: int = 0) -> str:
    """JSON in which a list or map stands on one line if it fits, else each of its items does."""
    line = json.dumps(value, ensure_ascii=False)
    is_map = isinstance(value, dict)
    if not isinstance(value, dict | list) or not value or len(line) + indent + used < WIDTH:
        return line
    names = [json.dumps(key, ensure_ascii=False) + ": " for key in value] if is_map else [""] * len(value)
    items = zip(names, value.values() if is_map else value, strict=True)
    inner = ",\n".join(" " * (indent + 2) + name + text_of(item, indent + 2, len(name) + 1) for name, item in items)
    opening, closing = "{}" if is_map else "[]"
    return f"{opening}\n{inner}\n{' ' * indent}{closing}"


def run_again(run: dict[str, Any], sources: dict[str, BookSource]) -> dict[str, Any]:
    """The run with the steps that the second implementation makes, of as many steps and fields as it had."""
    job: BookJob = job_of_run(run)
    made = list(islice(steps(job, streams_of_run(run, sources)), None if job.one_pass else len(run["steps"])))
    fields = [list(step) for step in run["steps"]]
    fields += [fields[-1]] * (len(made) - len(fields))
    found = [{name: step.vector()[name] for name in names} for step, names in zip(made, fields, strict=False)]
    return {**run, "decisions": made[-1].decisions, "steps": found}


def bytes_of_columns(fields: Any, is_column: bool = False) -> Any:
    """Fields of a state as msgpack has them: a digest's bytes, and a column's int64, little-endian."""
    if isinstance(fields, dict):
        return {
            name: bytes.fromhex(value)
            if name in DIGESTS
            else bytes_of_columns(value, is_column or name in ("position", "pool"))
            for name, value in fields.items()
        }
    return struct.pack(f"<{len(fields)}q", *fields) if is_column else fields


def state_again(vector: dict[str, Any]) -> dict[str, Any]:
    """The state with the bytes of its fields."""
    fields = vector["fields"]
    body = msgspec.msgpack.encode(bytes_of_columns(fields))
    return {"fields": fields, "bytes": (b"torchmix-state\x01" + hashlib.sha256(body).digest()[:8] + body).hex()}


def written_again(text: str) -> str:
    """The text of the vectors with its neighbouring parts `runs` and `state` made again, and all else left."""
    vectors = json.loads(text)
    sources = {name: BookSource(name=name, **sizes) for name, sizes in vectors["sources"].items()}
    parts = {
        "runs": [run_again(run, sources) for run in vectors["runs"]],
        "state": [state_again(vector) for vector in vectors["state"]],
    }
    start, stop = text.index('\n  "runs": ['), text.index('\n  "wire": [')
    lines = [f'  "{name}": {text_of(part, indent=2)},' for name, part in parts.items()]
    return text[: start + 1] + "\n".join(lines) + text[stop:]


if __name__ == "__main__":
    FILE.write_text(written_again(FILE.read_text(encoding="utf-8")), encoding="utf-8")
