"""Write docs/loader_vectors.json: the frames of one message of each kind, in hex.

python -m tests.writers.write_loader_vectors
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.loader_messages import EXAMPLES, example_arrays
from torchmix.service.messages import encode

ABOUT = "Frames of messages between loaders and clients, in hex; docs/formats.md, Loaders. The tests compare."


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
    path = Path(__file__).parents[2] / "docs" / "loader_vectors.json"
    path.write_text(json.dumps({"about": ABOUT, "messages": messages}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
