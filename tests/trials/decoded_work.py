"""Trial: frames and seconds that are decoded over those that are used, wherever items are decoded.

    python -m tests.trials.decoded_work --seed 1 --count 12

A case is one of {videos, sounds} x {rank, worker, loader} x {8 ranks of a node as threads, 8 real ranks of 4 nodes}, in
turn; what is decoded is noted in every process. An item that some rank uses in a step is decoded once in the whole job,
or not at all where a loader has it from a step before, so the ratio of items is at most 1, and so is that of seconds.
A video needs more frames than are seen: those since the keyframe before that others refer to. The job decodes as many
as one decoder needs for the items alone. A run that is started again goes on where it stopped.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.decode_log import digest_of, site_folder, starting_with
from tests.support.decoded_work import decoded, install
from tests.support.image_world import steps_of_ranks
from tests.support.media import MediaKind, write_media_project
from tests.support.node_jobs import results
from tests.support.processes import Processes
from tests.support.sounds import SOUND
from tests.support.trial import continued, trial_parser
from tests.support.videos import VIDEO, drawn_frames, video_of
from tests.trials.media import modality_of
from torchmix.indexing.scan import index_recipe
from torchmix.modalities.videos.kind import VideoModality
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe

STEPS, RANKS, NODES = 2, 8, 4
LENGTH = 512
FRAMES_A_SECOND = 24
GROUPS = (12, 48, 250)
"""Frames from one keyframe to the next: half a second, two seconds, and what x264 does by itself."""
PLACES = {"rank": "node", "worker": "node", "loader": "job,processes=2"}
JOBS = ("threads", "nodes")
CASES = [(kind, place, job) for job in JOBS for kind in ("video", "sound") for place in PLACES]


def make_clip(rng: np.random.Generator, number: int) -> bytes:
    """Some seconds at 24 frames a second, of H.264 with and without frames between others, or of VP9."""
    form = ("mp4", "libx264") if number % 4 else ("webm", "libvpx-vp9")
    count = int(rng.integers(3 * FRAMES_A_SECOND, 8 * FRAMES_A_SECOND))
    frames = drawn_frames(rng, count, 64, 48)
    keys, bframes = GROUPS[number % len(GROUPS)], (3, 0)[number % 2]
    return video_of(frames, form, rate=FRAMES_A_SECOND, keys=keys, bframes=bframes)


CLIPS = replace(
    VIDEO,
    make=make_clip,
    words={**VIDEO.words, "rate": 2, "least_frames": 4, "most_frames": 64},
)
KINDS: dict[str, MediaKind] = {"video": CLIPS, "sound": SOUND}


@contextmanager
def noted(folder: Path) -> Iterator[Path]:
    """What this process and those that it starts decode is noted in the folder that this gives."""
    log = folder / "decoded"
    site = site_folder(folder / "site", log, "tests.support.decoded_work")
    undo = install(str(log))
    try:
        with starting_with(site):
            yield log
    finally:
        undo()


def used_amount(kind: MediaKind, content: bytes) -> float:
    """Frames of a video that are seen, or seconds of a sound."""
    modality = modality_of(kind)
    measures = modality.measure(lambda at, count: content[at : at + count], len(content))
    if isinstance(modality, VideoModality):
        return float(modality.seen(np.array([measures[0]]), np.array([measures[1]]))[0])
    return measures[0] / measures[1]


def least_amount(kind: MediaKind, content: bytes, folder: Path) -> float:
    """What decoding an item once takes."""
    folder.mkdir()
    undo = install(str(folder))
    modality = modality_of(kind)
    try:
        modality.decode(content, modality.measure(lambda at, count: content[at : at + count], len(content)))
    finally:
        undo()
    return sum(one.amount for one in decoded(folder))


def items_used(recipe: Path, contents: list[bytes]) -> Counter[str]:
    """How often each item is in a step, as threads of ranks that decode get them."""
    used: Counter[str] = Counter()
    for of_rank in steps_of_ranks(recipe, Topology(dp=RANKS), STEPS, loaders="in_process"):
        for step in of_rank:
            numbers = step[0].modules["encoder"].arrays["number"].tolist()
            used.update(digest_of(contents[number]) for number in numbers)
    return used


def try_case(seed: int, number: int, *, cases: list[tuple[str, str, str]] = CASES, rows: int = 100) -> dict[str, Any]:
    """One case: what was decoded over what was used."""
    name, place, job = cases[number % len(cases)]
    kind = KINDS[name]
    with tempfile.TemporaryDirectory() as held:
        folder = Path(held)
        media = {"length": LENGTH, "rows": rows, "samples": RANKS, "decode_at": place}
        written = write_media_project(folder, replace(kind, make=_seeded(kind, seed)), ["lists"], **media)
        recipe = folder / "recipe.yaml"
        index_recipe(load_recipe(recipe), folder)
        contents = [item for row in written["lists"] for item in row.items]
        used = items_used(recipe, contents)
        with noted(folder) as log:
            if job == "threads":
                steps_of_ranks(recipe, Topology(dp=RANKS), STEPS, loaders=PLACES[place])
            else:
                _nodes(recipe, folder, PLACES[place])
            found = decoded(log)
        by_digest = {digest_of(content): content for content in contents}
        counts = Counter(one.digest for one in found)
        more, fewer = (counts - used).total(), (used - counts).total()
        assert not more, f"{more} of {used.total()} decodings too many"
        assert not fewer or place == "loader", f"{fewer} of {used.total()} decodings too few"  # loaders keep some
        amount = sum(used_amount(kind, by_digest[digest]) * count for digest, count in used.items())
        least = sum(least_amount(kind, by_digest[digest], folder / digest) * count for digest, count in counts.items())
        done = sum(one.amount for one in found)
    assert abs(done - least) < 1e-6 * least, "and once is what one decoder needs"
    return {
        "case": f"{name}, {place}, {job}",
        "items": sum(used.values()),
        "used": round(amount, 3),
        "decoded": round(done, 3),
        "ratio": round(done / amount, 3),
    }


def _seeded(kind: MediaKind, seed: int) -> Any:
    return lambda rng, number: kind.make(np.random.default_rng([seed, number]), number)


def _nodes(recipe: Path, folder: Path, loaders: str) -> None:
    """The same steps in real ranks, which stand for several nodes."""
    words = ("-m", "tests.support.node_rank", str(recipe), str(STEPS), "1", "1", "1")
    environment = {"NODES": str(NODES), "LOADERS": loaders, "PYTHONPATH": os.environ["PYTHONPATH"]}
    with Processes(folder) as processes:
        results(processes, processes.start_ranks(*words, world_size=RANKS, after=(), environment=environment))


def main() -> None:
    """Run from the command line."""
    asked = trial_parser(__doc__, count=len(CASES), out="decoded_work.json").parse_args()
    found = continued(asked, try_case)
    print("| items, where they are decoded, job | items | used | decoded | decoded / used |\n|---|---|---|---|---|")
    for one in found.values():
        print(f"| {one['case']} | {one['items']} | {one['used']} | {one['decoded']} | {one['ratio']} |")


if __name__ == "__main__":
    main()
