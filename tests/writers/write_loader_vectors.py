"""Write docs/loader_vectors.json: the frames of one message of each kind, in hex, and checksums of longer bodies.

python -m tests.writers.write_loader_vectors
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.loader_messages import EXAMPLES, example_arrays
from torchmix.service.messages import checksum_of, encode

ABOUT = (
    "Frames of messages between loaders and clients, in hex; docs/formats.md, Loaders. The tests compare. "
    " Byte k of a body of `checksums` is k * k % 251."
)
HEADER = bytes.fromhex("c0ffee")


def body_of(num_bytes: int) -> bytes:
    """The body whose checksum is written."""
    return bytes(k * k % 251 for k in range(num_bytes))


def main() -> None:
    """Write the file."""
    messages = [
        {
            "message": type(message).__name__,
            "arrays": {
                name: {"dtype": array.dtype.name, "values": array.tolist()}
                for name, array in example_arrays(message).items()
            },
            "frames": [bytes(frame).hex() for frame in encode(message, example_arrays(message))],
        }
        for message in EXAMPLES
    ]
    checksums = [
        {"header": HEADER.hex(), "body_bytes": size, "checksum": checksum_of(HEADER, body_of(size))}
        for size in (0, 4095, 4096, 4097, 10_000, 1 << 20)
    ]
    path = Path(__file__).parents[2] / "docs" / "loader_vectors.json"
    path.write_text(
        json.dumps({"about": ABOUT, "messages": messages, "checksums": checksums}, indent=1) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
