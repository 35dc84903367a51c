"""The C files -> one shared library, with a digest of the sources in it; `setup.py` uses this file, too.

    python -m torchmix.native.build            builds beside the sources, if the library there is not of these sources
    python -m torchmix.native.build --out X    builds X

The compiler is that of the variable CC, or else the first of cc, gcc and clang that is found. CFLAGS adds options.
Imports nothing of torchmix: `setup.py` runs it where no package is installed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
LIBRARY = "torchmix_native.so"
COMPILERS = ("cc", "gcc", "clang")
# No fast math and no option for the processor of this machine: the result is the same everywhere, bit for bit.
FLAGS = (
    "-std=c11",
    "-O3",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-fwrapv",  # sums of values that nobody has checked wrap around, as those of numpy
    "-Wall",
    "-Wextra",
)
DEADLINE_S = 300


class CannotBuild(Exception):
    """There is no compiler, or it has failed."""


def sources() -> list[Path]:
    """The C files, sorted."""
    return sorted(FOLDER.glob("*.c"))


def digest_of_sources() -> str:
    """32 hex digits over options, names and bytes of the C files and headers."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted([*FOLDER.glob("*.c"), *FOLDER.glob("*.h")]):
        content = path.read_bytes()
        digest.update(f"\0{path.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:32]


def compiler() -> list[str]:
    """The words of the command.

    Raises:
        CannotBuild: None is found.
    """
    words = shlex.split(os.environ.get("CC", ""))
    if words:
        return words
    found = next((name for name in COMPILERS if shutil.which(name)), None)
    if found is None:
        raise CannotBuild(f"no C compiler is found; install one of {', '.join(COMPILERS)}, or name it in CC")
    return [found]


def build(out: Path) -> None:
    """Compile all sources; `out` is replaced whole, so a process that has loaded it keeps what it has.

    Raises:
        CannotBuild: There is no compiler, or it fails; its words are in the message.
    """
    command = [*compiler(), *FLAGS, *shlex.split(os.environ.get("CFLAGS", ""))]
    out.parent.mkdir(parents=True, exist_ok=True)
    handle, written = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
    os.close(handle)
    command += [f'-DTORCHMIX_SOURCES="{digest_of_sources()}"', *map(str, sources()), "-o", written]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        if done.returncode:
            raise CannotBuild(f"{shlex.join(command[:1])} fails: {done.stderr.strip() or done.returncode}")
        Path(written).chmod(0o755)
        Path(written).replace(out)
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotBuild(f"{command[0]}: {error}") from error
    finally:
        Path(written).unlink(missing_ok=True)


def is_of_these_sources(library: Path) -> bool:
    """Whether a library has the digest of the sources; it is not loaded."""
    return library.is_file() and digest_of_sources().encode() in library.read_bytes()


def main() -> int:
    """Build; without a compiler that is no failure, unless TORCHMIX_NATIVE=1 requires the library."""
    parser = argparse.ArgumentParser(prog="python -m torchmix.native.build")
    parser.add_argument("--out", type=Path, help="the library; by default beside the sources, if it is not of them")
    out = parser.parse_args().out
    if out is None and is_of_these_sources(FOLDER / LIBRARY):
        return 0
    try:
        build(FOLDER / LIBRARY if out is None else out)
    except CannotBuild as error:
        is_required = os.environ.get("TORCHMIX_NATIVE") == "1"
        rest = "" if is_required else "; torchmix works without it, small steps take more of the processor"
        sys.stderr.write(f"torchmix: the native library is not built: {error}{rest}\n")
        return int(is_required)
    return 0


if __name__ == "__main__":
    sys.exit(main())
