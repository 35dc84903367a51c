"""A disk that is full before the ids of an index fit: `python -m tests.support.small_disk FOLDER SEED ROOM_KIB STEPS`.

FOLDER is an empty file system of its own, where `on_small_disk` can make one. A job is written there and the disk is
filled up to ROOM_KIB; then it is indexed with its ids kept, and once more with room if there is none for the catalog.
The last line is JSON: what the index has said, whether it was an error, and a hash of the tensors of each step.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.deadlines import LONG_S
from tests.support.forks import ROOT
from tests.support.loaders import write_job
from tests.support.step_hashes import hashes_of_steps
from torchmix.errors import CatalogError
from torchmix.formats.kept_ids import KEPT_FOLDER
from torchmix.indexing.scan import index
from torchmix.parallel.topology import Topology
from torchmix.stateful.open import build_loader

DISK_MIB = 16
FULL = ("No space left on device", "File too large")
"""The kernel's words of a disk without room, and of a file that may not grow."""
_INSIDE = 'mount -t tmpfs -o size="$1"m tmpfs "$2" && shift 2 && exec "$@"'


def on_small_disk(folder: Path, *words: str) -> str:
    """Run this module there; what it prints. Where no disk can be made, no file grows beyond the room."""
    folder.mkdir()
    space = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _INSIDE, "sh", str(DISK_MIB), str(folder)]
    if shutil.which("unshare") is None or subprocess.run([*space, "true"], capture_output=True, check=False).returncode:
        space = []
    program = [sys.executable, "-m", "tests.support.small_disk", str(folder), *words]
    done = subprocess.run(
        [*space, *program], cwd=ROOT, capture_output=True, text=True, timeout=LONG_S, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@contextmanager
def little_room(folder: Path, num_bytes: int) -> Iterator[None]:
    """Fill a small disk up to this room; of one that is none, bound the size of files."""
    status = os.statvfs(folder)
    if status.f_blocks * status.f_frsize > DISK_MIB << 20:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return
    ballast = folder / "ballast"
    ballast.write_bytes(bytes(max(0, status.f_bavail * status.f_frsize - num_bytes)))
    try:
        yield
    finally:
        ballast.unlink()


def main(folder: Path, seed: int, room_kib: int, steps: int) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torchmix").addHandler(handler)
    recipe = write_job(folder / "job", seed=seed)
    catalog = recipe.parent / "catalog"
    shutil.rmtree(catalog)
    error = ""
    try:
        with little_room(folder, room_kib << 10):
            index(recipe, keep_tokens=True)
    except CatalogError as failure:
        error = str(failure)
        index(recipe, keep_tokens=True)
    kept = [path.name for path in (catalog / KEPT_FOLDER).iterdir()] if (catalog / KEPT_FOLDER).is_dir() else []
    with build_loader(recipe, topology=Topology(), loaders="in_process", max_steps=steps) as loader:
        found = hashes_of_steps(loader)
    print(json.dumps({"said": said, "error": error, "kept": kept, "steps": found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
