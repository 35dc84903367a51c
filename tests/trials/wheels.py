"""Trial: the wheel in clean environments of several Pythons, and what each C compiler, or none, makes of it.

    python -m tests.trials.wheels python3.10 python3.13 --out wheels.json
    python -m tests.trials.wheels python3.12 --without-torch
    python -m tests.trials.wheels --compilers none gcc clang zig --out compilers.json

In: interpreters. Out: one JSON, for each interpreter the versions that pip chose, what failed, and how long each thing
took. The wheel is built once; each interpreter has an empty environment with the wheel alone, and runs in a folder
outside the repository: `pip check`, every module's import, and the demonstration from `init` to `trace`; with torch
also a loader's first steps, and a resume. `--without-torch` leaves out torch and torchdata, which are gigabytes
where no CPU build is offered: what runs before training needs neither. Interpreters that the file has are not run
again. An interpreter takes a minute, and what pip downloads.

With `--compilers` wheel and source distribution are built by each compiler, with warnings as errors, and each installed
in an empty environment of this Python, which borrows all other packages from here. There the frozen order is made, and
the first steps of the demonstration, whose digest and tokens are those of this working tree without the library; calls
of the library are counted. Without a compiler there are none, which is logged once, and stands in `stats()` and the
doctor. `zig` is that of PyPI's `ziglang`, which this environment needs, for glibc 2.17. A build takes half a minute.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[2]
DEADLINE_S = 1800
NEED_TORCH = re.compile(r"torchmix\.(constructor|stateful|megatron_adapter)\b")
EVERY_IMPORT = """
import importlib, pkgutil, torchmix
found = [module.name for module in pkgutil.walk_packages(torchmix.__path__, "torchmix.") if not SKIPPED(module.name)]
names = [name for name in found if name != "torchmix.native.torchmix_native"]  # a library, no module of Python
failed = {}
for name in names:
    try:
        importlib.import_module(name)
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in OPTIONAL:
            failed[name] = repr(error)
assert not failed, failed
print(len(names))
"""
FIRST_STEPS = """
import torchmix
def steps(state, count):
    with torchmix.build_loader("recipe.yaml", micro_batch_size=4, max_steps=count, loaders=LOADERS) as loader:
        if state is not None:
            loader.load_state_dict(state)
        for microbatch in loader:
            assert microbatch.tokens.shape == (4, 1024) and microbatch.tokens.max() < 257
        return loader.state_dict(), loader.order_digest
def main():
    assert steps(steps(None, 2)[0], 3)[1] == steps(None, 3)[1]
if __name__ == "__main__":
    main()
"""
SAID_STEPS = """
import hashlib, json, logging, sys
logged = []
class Keep(logging.Handler):
    def emit(self, record):
        logged.append(record.getMessage())
logging.getLogger("torchmix").addHandler(Keep())
logging.getLogger("torchmix").setLevel("INFO")
import torchmix
from torchmix.native.load import num_calls
digest = hashlib.sha256()
with torchmix.build_loader("recipe.yaml", micro_batch_size=4, max_steps=3, loaders="in_process") as loader:
    for microbatch in loader:
        digest.update(microbatch.tokens.numpy().tobytes() + microbatch.labels.numpy().tobytes())
    print(json.dumps({
        "steps": [loader.order_digest, digest.hexdigest()],
        "native": loader.stats()["native"],
        "calls": num_calls(),
        "logged": [line for line in logged if "native library" in line],
        "package": torchmix.__file__,
    }))
"""
VERB = "import sys; from torchmix.cli.main import main; sys.exit(main(sys.argv[1:]))"
GLIBC = re.compile(rb"GLIBC_2\.(\d+)")
OPTIONAL = ("tokenizers", "tiktoken", "fsspec", "huggingface_hub", "PIL", "ray", "matplotlib", "megatron", "shtab")


def build_wheel(folder: Path) -> Path:
    """The wheel of this working tree."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, timeout=DEADLINE_S)
    [wheel] = folder.glob("torchmix_data-*.whl")
    return wheel


def requirements_of(wheel: Path) -> list[str]:
    """What the wheel needs beside extras."""
    with ZipFile(wheel) as opened:
        [name] = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        needed = message_from_bytes(opened.read(name)).get_all("Requires-Dist") or []
    return [requirement for requirement in needed if "extra ==" not in requirement]


def scripts_of(with_torch: bool) -> dict[str, str]:
    """Python to run, by name."""
    skipped = "lambda name: False" if with_torch else f"__import__('re').compile({NEED_TORCH.pattern!r}).match"
    head = f"OPTIONAL = {OPTIONAL + (() if with_torch else ('torch', 'torchdata'))!r}\nSKIPPED = {skipped}\n"
    scripts = {"imports": head + EVERY_IMPORT}
    if with_torch:
        scripts |= {f"loader {where}": f"LOADERS = {where!r}\n{FIRST_STEPS}" for where in ("in_process", "node")}
    return scripts


def commands_of(torchmix: Path) -> dict[str, list[str]]:
    """Commands to run in a folder that is empty at first, by name."""
    lines = (
        "init --demo .",
        "index recipe.yaml",
        "check recipe.yaml --steps 20",
        "plan recipe.yaml --steps 20 --dp 2 --out plan",
        "show recipe.yaml --step 7 --sample 0",
        "trace recipe.yaml --row docs:0 --steps 20",
        "top --once",
        "doctor",
        "--version",
        "--help",
        "plan --help",
    )
    return {f"torchmix {line}": [str(torchmix), *shlex.split(line)] for line in lines}


def try_python(python: str, wheel: Path, folder: Path, torch: str | None, versions: Sequence[str]) -> dict[str, object]:
    """Install and run; what failed, and how long each thing took."""
    found: dict[str, object] = {"torch": torch is not None, "failed": {}, "seconds": {}}
    empty = folder / "empty"
    empty.mkdir()
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}

    def run(name: str, command: Sequence[str]) -> str:
        begin = time.perf_counter()
        done = subprocess.run(
            command, cwd=empty, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        found["seconds"][name] = round(time.perf_counter() - begin, 1)  # type: ignore[index]
        if done.returncode:
            found["failed"][name] = (done.stdout + done.stderr)[-2000:]  # type: ignore[index]
        return done.stdout

    run("venv", [python, "-m", "venv", str(folder / "venv")])
    of_venv = str(folder / "venv" / "bin" / "python")
    pip = [of_venv, "-m", "pip", "--disable-pip-version-check"]
    if torch is None:
        needed = [line for line in requirements_of(wheel) if not re.match(r"torch(data)?\b", line)]
        run("install", [*pip, "install", "--quiet", *needed, *versions])
        run("install wheel", [*pip, "install", "--quiet", "--no-deps", str(wheel)])
    else:
        run("install", [*pip, "install", "--quiet", torch, *versions, str(wheel)])
        run("pip check", [*pip, "check"])
    listed = json.loads(run("list", [*pip, "list", "--format", "json"]) or "[]")
    found["versions"] = {each["name"]: each["version"] for each in listed if not each["name"].startswith("nvidia")}
    for name, command in commands_of(folder / "venv" / "bin" / "torchmix").items():
        run(name, command)
    for name, text in scripts_of(torch is not None).items():
        script = folder / f"{name.replace(' ', '_')}.py"
        script.write_text(text, encoding="utf-8")
        run(name, [of_venv, str(script)])
    return found


def run(pythons: Sequence[str], out: Path, torch: str | None, versions: Sequence[str]) -> dict[str, object]:
    """Try each interpreter; the file is written after each."""
    found: dict[str, object] = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    with tempfile.TemporaryDirectory() as temporary:
        wheel = build_wheel(Path(temporary))
        for python in pythons:
            version = subprocess.run(
                [python, "-c", "import platform; print(platform.python_version())"],
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            ).stdout.strip()
            name = " ".join((f"Python {version}", torch or "without torch", *versions))
            if name not in found:
                folder = Path(temporary) / str(len(found))
                folder.mkdir()
                found[name] = try_python(python, wheel, folder, torch, versions)
                out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return found


# --- The library by each compiler.

COMPILERS = {
    "none": "",
    "gcc": "gcc",
    "clang": "clang",
    "zig": f"{shlex.quote(sys.executable)} -m ziglang cc -target x86_64-linux-gnu.2.17",
}
"""What the variable CC says; without one the path is empty, too."""
KINDS = ("wheel", "sdist")


def build_sdist(folder: Path) -> Path:
    """The source distribution of this working tree's tracked files; the tree is left alone."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=DEADLINE_S
    )
    copy = folder / "copy"
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, copy / name)
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(folder)], cwd=copy, check=True, capture_output=True, timeout=DEADLINE_S
    )
    [sdist] = folder.glob("torchmix_data-*.tar.gz")
    return sdist


def try_compiler(compiler: str, kind: str, sdist: Path, folder: Path) -> dict[str, object]:
    """Build, install and use; what failed, and what was found."""
    failed, found = dict[str, str](), dict[str, object]()
    here = folder / "here"
    here.mkdir(parents=True)
    own = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV", "TORCHMIX"))}
    building = own | {"CC": COMPILERS[compiler], "CFLAGS": "-Werror"}
    if compiler == "none":
        building["PATH"] = str(here)
    else:
        building["TORCHMIX_NATIVE"] = "1"  # a build that fails is an error, and no wheel without the library

    def run(name: str, *command: str | Path, **environment: str) -> str:
        done = subprocess.run(
            command, cwd=here, env=environment or own, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        if done.returncode:
            failed[name] = (done.stdout + done.stderr)[-2000:]
        return done.stdout

    python = folder / "venv" / "bin" / "python"
    run("venv", sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    # Lines of a .pth file are paths, and .pth files that lie there are not read: the tree's own package is not seen.
    [packages] = (folder / "venv" / "lib").glob("python*/site-packages")
    (packages / "borrowed.pth").write_text("\n".join(site.getsitepackages()), encoding="utf-8")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    plainly = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    if kind == "wheel":
        run("wheel", *pip, "wheel", *plainly, "--wheel-dir", folder, sdist, **building)
        [wheel] = folder.glob("torchmix_data-*.whl")
        found["tag"] = wheel.stem.partition("-py3-")[2]
        run("install", *pip, "install", *plainly, "--ignore-installed", wheel)
    else:
        run("install", *pip, "install", *plainly, "--ignore-installed", sdist, **building)

    using = own if compiler == "none" else own | {"TORCHMIX_NATIVE": "1"}
    library = next(packages.glob("torchmix/native/*.so"), None)
    if (compiler == "none") != (library is None):
        failed["library"] = f"it is {library}"
    if library is not None:
        versions = [int(minor) for minor in GLIBC.findall(library.read_bytes())]
        found["glibc"] = f"2.{max(versions, default=0)}"
        if compiler == "zig" and max(versions, default=0) > 17:
            failed["glibc"] = f"it needs glibc {found['glibc']}"
    shutil.copytree(ROOT / "tests", here / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    if run("order", python, "-m", "tests.golden.test_order", **using) != (ROOT / "tests/golden/order.txt").read_text():
        failed.setdefault("order", "the frozen order is another one")
    torchmix = folder / "venv" / "bin" / "torchmix"
    run("init", torchmix, "init", "--demo", ".", **using)
    run("index", torchmix, "index", "recipe.yaml", **using)
    doctor = json.loads(run("doctor", torchmix, "doctor", "--json", **using) or "{}")
    if doctor.get("leftovers"):  # of other runs on this machine: then its exit code is 1
        failed.pop("doctor", None)
    said = json.loads(run("steps", python, "-c", SAID_STEPS, **using) or "{}")
    if not str(said.get("package", "")).startswith(str(packages)):
        failed["package"] = str(said)
    is_native = compiler != "none"
    log = said.get("logged", [])
    if (
        bool(said.get("native")) != is_native
        or bool(said.get("calls")) != is_native
        or doctor.get("native", {}).get("is_used") != is_native
        or len(log) != (0 if is_native else 1)
    ):
        failed["said"] = f"{said}; doctor: {doctor.get('native')}"
    return {"failed": failed, **found, "logged": log, "calls": said.get("calls"), "steps": said.get("steps")}


def steps_of_tree(folder: Path) -> object:
    """What `SAID_STEPS` finds in this working tree without the library."""
    variables = {"PYTHONPATH": str(ROOT), "TORCHMIX_NATIVE": "0"}
    folder.mkdir()
    said = ""
    for words in (["init", "--demo", "."], ["index", "recipe.yaml"], []):
        command = ["-c", VERB if words else SAID_STEPS, *words]
        said = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        ).stdout
    return json.loads(said)["steps"]


def run_compilers(compilers: Sequence[str], out: Path, kinds: Sequence[str] = KINDS) -> dict[str, object]:
    """Try each compiler with wheel and source distribution; the file is written after each."""
    found: dict[str, object] = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sdist, expected = build_sdist(folder), steps_of_tree(folder / "tree")
        for compiler, kind in itertools.product(compilers, kinds):
            if f"{compiler} {kind}" not in found:
                one = try_compiler(compiler, kind, sdist, folder / compiler / kind)
                if one.pop("steps") != expected:
                    one["failed"]["steps"] = "digest or tokens are others"  # type: ignore[index]
                found[f"{compiler} {kind}"] = one
                out.write_text(json.dumps(found, indent=1), encoding="utf-8")
                shutil.rmtree(folder / compiler / kind)
    return found


def main() -> int:
    """Run from the command line; 1 where something failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("pythons", nargs="*", default=[sys.executable])
    parser.add_argument("--torch", default="torch", help="what pip installs, such as torch==2.6.0 or a wheel's path")
    parser.add_argument("--without-torch", action="store_true")
    parser.add_argument("--also", nargs="*", default=[], help="versions to install, such as numpy==1.26.4")
    parser.add_argument("--compilers", nargs="+", choices=list(COMPILERS), help="try these instead of interpreters")
    parser.add_argument("--out", type=Path, default=Path("wheels.json"))
    asked = parser.parse_args()
    if asked.compilers:
        found = run_compilers(asked.compilers, asked.out)
    else:
        found = run(asked.pythons, asked.out, None if asked.without_torch else asked.torch, asked.also)
    print(json.dumps(found, indent=1))
    return int(any(each["failed"] for each in found.values()))  # type: ignore[index]


if __name__ == "__main__":
    sys.exit(main())
