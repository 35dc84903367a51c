"""Notes every image that Pillow opens in a process, by the hash of its bytes: the decoder decodes each that it opens.

install(FOLDER)           from now on, into FOLDER/ROLE-PID; what it returns undoes it
site_folder(PATH, LOG)    a folder for PYTHONPATH that installs it in every new interpreter
starting_with(PATH)       inside, new interpreters begin with that folder
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any
from unittest.mock import patch


def install(folder: str) -> Callable[[], None]:
    """Note what is opened from now on, until the function that is returned is called."""
    from PIL import Image

    opened, lock = Image.open, Lock()
    words = {"worker.main": "worker", "service.main": "loader"}
    role = next((role for word, role in words.items() if any(word in one for one in sys.orig_argv)), "other")

    def noted(file: Any, *arguments: Any, **options: Any) -> Any:
        digest = hashlib.sha1(file.getvalue()).hexdigest()
        with lock, Path(folder, f"{role}-{os.getpid()}").open("a", encoding="ascii") as log:
            log.write(f"{digest}\n")
        return opened(file, *arguments, **options)

    Image.open = noted  # type: ignore[assignment]

    def undo() -> None:
        Image.open = opened

    return undo


def site_folder(path: Path, folder: Path, module: str = __name__) -> Path:
    """Write it; the interpreter imports `sitecustomize` as it starts, and calls `install` of the module."""
    path.mkdir()
    folder.mkdir()
    (path / "sitecustomize.py").write_text(f"from {module} import install\n\ninstall({str(folder)!r})\n")
    return path


@contextmanager
def starting_with(site: Path) -> Iterator[None]:
    """Interpreters that are started inside have this folder first on their path, and the tests."""
    paths = [str(site), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    with patch.dict(os.environ, {"PYTHONPATH": os.pathsep.join(filter(None, paths))}):
        yield


def decoded(folder: Path) -> Counter[str]:
    """How often each image was opened, over all processes."""
    return Counter(line for log in folder.iterdir() for line in log.read_text().split())


def digest_of(content: bytes) -> str:
    """As the log has it."""
    return hashlib.sha1(content).hexdigest()
