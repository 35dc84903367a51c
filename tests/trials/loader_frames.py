"""Trial: frames that are no messages, or lie about what they hold, at both decoders and at a loader that runs.

    python -m tests.trials.loader_frames --seed 1 --count 100000 --out frames.json

A frame is one of each message, damaged; or altered in its header or its arrays, with a checksum that fits, so that what
is behind the checksum sees it. A decoder gives a message or raises `WireError`, and the arrays of a request are refused
or are what a request may ask. A hundredth of the frames goes to a loader, and frames of 64 MB between them: it goes on
serving, and its memory does not grow with them.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from tests.support.catalogs import random_world
from tests.support.fleets import fleet_reader, running
from tests.support.loader_messages import EXAMPLES, damaged, decoder_of, example_arrays
from tests.support.reading import random_pieces, read_with_successors
from tests.support.trial import trial_parser, whole
from torchmix.errors import WireError
from torchmix.reader.reader import Reader
from torchmix.service.messages import (
    TAG,
    TARGET_BYTES,
    PieceRequest,
    checksum_of,
    encode,
    pieces_of,
    planned_bytes,
)

HUGE_BYTES = 64 << 20
GROWTH_BYTES = 48 << 20
"""Of the loader's process: of both decoders and the client in it, too."""
VALUES: tuple[Any, ...] = (
    0,
    -1,
    1 << 62,
    1 << 70,
    1.5,
    "",
    "x" * 5000,
    b"\xff",
    None,
    [],
    {},
    True,
    ["a", "int32", [1]],
)


def altered(frames: tuple[bytes, memoryview], chance: random.Random) -> list[bytes]:
    """Frames with another header or other arrays, and a checksum that fits."""
    head = len(TAG) + 5
    header, body = bytearray(frames[0][head:]), bytearray(frames[1])
    match chance.randrange(4):
        case 0:
            header[chance.randrange(len(header))] = chance.randrange(256)
        case 1:
            fields = msgspec.msgpack.decode(bytes(header))
            at = chance.randrange(len(fields))
            fields[at] = chance.choice(VALUES)
            header = bytearray(msgspec.msgpack.encode(fields)) if fields[at] != 1 << 70 else header[:-1]
        case 2 if body:
            at = chance.randrange(len(body))
            body[at : at + 8] = chance.randbytes(len(body[at : at + 8]))
        case _:
            body = body[: chance.randrange(len(body) + 1)] if chance.random() < 0.5 else body + chance.randbytes(64)
    checksum = checksum_of(bytes(header), bytes(body))
    return [frames[0][: head - 4] + checksum.to_bytes(4, "little") + bytes(header), bytes(body)]


def frames_of(number: int, seed: int) -> tuple[Any, list[bytes]]:
    """A message, and frames made from it."""
    chance = random.Random(f"{seed} {number}")
    message = chance.choice(EXAMPLES)
    frames = encode(message, example_arrays(message))
    return message, (damaged if chance.random() < 0.3 else altered)(frames, chance)


def check(number: int, seed: int) -> str:
    """What became of frames at their decoder."""
    message, frames = frames_of(number, seed)
    try:
        found, arrays = decoder_of(message)(frames)
        if isinstance(found, PieceRequest):
            columns = pieces_of(arrays)
            assert len(columns.source)
            assert planned_bytes(len(columns.source), int(columns.tokens.sum())) <= TARGET_BYTES
    except WireError:
        return "refused"
    return "taken"


def run(seed: int, count: int) -> dict[str, int]:
    """Check `count` frames, and a loader that gets some of them; counts of what happened."""
    counts: Counter[str] = Counter(check(number, seed) for number in range(count))
    with tempfile.TemporaryDirectory() as name:
        world = random_world(Path(name), seed)
        catalog = world.index()
        expected = Reader(catalog, world.directory, cache_bytes=1 << 24, seed=0)
        with (
            running(catalog, world.directory) as server,
            fleet_reader(catalog, [server.endpoint]) as reader,
        ):
            before = _memory()
            foe = _foe(server.endpoint)
            for k in range(max(100, count // 100)):
                foe.send_multipart(frames_of(k, seed)[1])
                if k % 100 == 50:
                    foe.send_multipart([b"x", bytes(HUGE_BYTES)])  # the connection ends
                    foe.close(0)
                    foe = _foe(server.endpoint)
                    counts["huge"] += 1
                    asked = random_pieces(world, np.random.default_rng([seed, k]), 40)
                    given = read_with_successors(reader, asked)
                    assert np.array_equal(given, read_with_successors(expected, asked))
            foe.close(0)
            assert _memory() - before < GROWTH_BYTES + HUGE_BYTES, "one such frame may be on its way from here"
        expected.close()
    return dict(counts)


def _foe(endpoint: str) -> Any:
    foe = zmq.Context.instance().socket(zmq.DEALER)
    foe.setsockopt(zmq.LINGER, 0)
    foe.connect(endpoint)
    return foe


def _memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) << 10
    return 0


def main() -> None:
    """Check frames, and write what became of them."""
    whole(trial_parser(__doc__, count=1000, out="loader_frames.json").parse_args(), run)


if __name__ == "__main__":
    main()
