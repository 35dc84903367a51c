"""The native library is used where it is of the sources beside it; where it is not, that is said, once."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.deadlines import LONG_S
from tests.support.native import built_library, native_or_not
from torchmix.cli.main import main
from torchmix.errors import NativeError, OptionError
from torchmix.native import load
from torchmix.native.build import FLAGS, FOLDER, LIBRARY, CannotBuild, build, compiler, is_of_these_sources, sources
from torchmix.native.calls import Gather
from torchmix.native.load import array_of, run


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package's folder with sources of its own, without a library."""
    to = tmp_path / "torchmix"
    shutil.copytree(FOLDER.parent, to, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return to


def python(copy: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != load.VARIABLE}
    # What is built here need not be fast.
    environment |= {"PYTHONPATH": str(copy.parent), "CFLAGS": "-O0", **variables}
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=copy.parent, env=environment, capture_output=True, text=True, timeout=LONG_S, check=False
    )


START = "from torchmix.native.load import native; import logging; logging.basicConfig(level='INFO'); native(); "


@pytest.mark.slow
def test_a_build_is_used_until_the_sources_change(copy: Path) -> None:
    built_library()  # or this test is skipped
    show = START + "print(native().library is not None); native()"
    assert python(copy, "-c", show).stdout == "False\n"
    built = python(copy, "-m", "torchmix.native.build")
    assert built.returncode == 0, built.stderr
    assert python(copy, "-c", show).stdout == "True\n"
    first = (copy / "native" / LIBRARY).stat()
    assert python(copy, "-m", "torchmix.native.build").returncode == 0
    assert (copy / "native" / LIBRARY).stat().st_mtime_ns == first.st_mtime_ns, "it is of these sources"
    with (copy / "native" / "native.h").open("a") as header:
        header.write("/* pulled */\n")
    stale = python(copy, "-c", show)
    assert stale.stdout == "False\n"
    assert stale.stderr.count("WARNING") == 1 and load.BUILD in stale.stderr and "other sources" in stale.stderr
    assert python(copy, "-m", "torchmix.native.build").returncode == 0
    assert python(copy, "-c", show).stdout == "True\n"


def test_without_a_compiler_all_works_and_it_is_said_once(copy: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "empty"
    nowhere.mkdir()
    built = python(copy, "-m", "torchmix.native.build", PATH=str(nowhere), CC="")
    assert built.returncode == 0 and "no C compiler is found" in built.stderr
    assert not (copy / "native" / LIBRARY).exists()
    log = python(copy, "-c", START + "native()").stderr
    assert log.count("INFO") == 1 and "is not built" in log and load.BUILD in log
    required = python(copy, "-m", "torchmix.native.build", PATH=str(nowhere), CC="", TORCHMIX_NATIVE="1")
    assert required.returncode == 1
    asked = python(copy, "-c", START, TORCHMIX_NATIVE="1")
    assert asked.returncode and "TORCHMIX_NATIVE=1 requires the native library" in asked.stderr


def test_a_failing_compiler_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "false")
    with pytest.raises(CannotBuild, match="false fails"):
        build(tmp_path / LIBRARY)
    monkeypatch.setenv("CC", "no-such-compiler --here")
    with pytest.raises(CannotBuild, match="no-such-compiler"):
        build(tmp_path / LIBRARY)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_library_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / LIBRARY).write_bytes(b"\x7fELF, and no more")
    assert "cannot be loaded" in load.load(tmp_path / LIBRARY).why_not


@pytest.mark.parametrize("said", ["2", "yes"])
def test_the_variable_is_0_or_1(said: str) -> None:
    with pytest.raises(OptionError, match=r"TORCHMIX_NATIVE='.+'; it is 0 .* or 1"):
        load._find(said, FOLDER / LIBRARY)


def test_0_leaves_it_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert load._find("0", FOLDER / LIBRARY).why_not == "TORCHMIX_NATIVE=0 is set"
    assert not caplog.records, "who has said so knows it"


def test_the_doctor_says_whether_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    for is_native in (True, False):
        with native_or_not(is_native):
            main(["doctor"])
            text = capsys.readouterr().out
            main(["doctor", "--json"])
            said = json.loads(capsys.readouterr().out)["native"]
        assert said["is_used"] == is_native
        assert ("the native library is used\n" in text) == is_native
        assert ("not used: this test goes without" in text) != is_native


def test_a_struct_of_another_size_and_an_array_of_another_dtype_are_refused() -> None:
    class Longer(Gather):
        _fields_ = (("more", load.Array),)

    with native_or_not(True):
        with pytest.raises(NativeError, match="the struct has another size"):
            run(Longer())
        with pytest.raises(NativeError, match="contiguous array of int64, this is int32"):
            array_of(np.zeros(3, np.int32), np.int64)
        with pytest.raises(NativeError, match="contiguous"):
            array_of(np.zeros(6, np.int64)[::2], np.int64)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gcc", "clang", "zig"])
def test_compilers_have_no_warning(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zig = f"{shlex.quote(sys.executable)} -m ziglang"
    if name == "zig":
        pytest.importorskip("ziglang", reason="ziglang is not installed")
    elif not shutil.which(name):
        pytest.skip(f"{name} is not installed")
    monkeypatch.setenv("CC", f"{zig} cc" if name == "zig" else name)
    monkeypatch.setenv("CFLAGS", "-Werror -Wconversion -Wno-sign-conversion")
    build(tmp_path / LIBRARY)
    assert is_of_these_sources(tmp_path / LIBRARY)


def test_the_sources_name_no_python() -> None:
    assert compiler() and "-ffast-math" not in FLAGS
    assert all("Python.h" not in path.read_text(encoding="utf-8") for path in sources())
