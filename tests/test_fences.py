"""Fences: the rules of the house that a reader relies on, held by the syntax tree of every file.

A room imports only rooms above it; what a loader process imports is free of torch; nothing executable is stored or
sent; names and files keep their grammar. A fence that fails names file, line and rule.
"""

from __future__ import annotations

import ast
import gc
import importlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.deadlines import LONG_S
from torchmix.modalities.table import KINDS
from torchmix.recipe.items import KINDS as RECIPE_KINDS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torchmix"

# Reading order, data-flow order and import order at once.
ROOMS = (
    "errors",
    "native",
    "lazy_names",
    "array_types",
    "recipe",
    "storage",
    "catalog",
    "transform",
    "modalities",
    "formats",
    "indexing",
    "mixture",
    "reader",
    "pages",
    "parallel",
    "boards",
    "planner",
    "service",
    "constructor",
    "steps",
    "lineage",
    "stateful",
    "elastic",
    "megatron_adapter",
    "cli",
)
RE_EXPORTING = ("torchmix", "torchmix.parallel", "torchmix.stateful", "torchmix.megatron_adapter")
FIRST_ROOM_WITH_TORCH = "constructor"
TORCH_FILES_ABOVE = (
    "parallel/routes.py",
    "parallel/groups.py",
    "parallel/fan_out.py",
    "parallel/liveness/open.py",
)
TORCH_FREE_FILES_BELOW = (
    "constructor/arrays.py",
    "constructor/spans.py",
    "constructor/runs.py",
    "constructor/build.py",
    "constructor/modules.py",
)
TORCH_FREE_ROOMS_BELOW = ("steps", "lineage")
"""What a worker process or the command line imports."""
ROOMS_OF_THE_RECIPE = ("recipe", "indexing", "planner", "stateful", "megatron_adapter", "cli")
"""The others take what they need of it."""
BANNED_MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
BANNED_CALLS = {"eval", "exec", "__import__"}
OBJECT_COLLECTIVE = re.compile(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?")


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


FILES = files_of(PACKAGE)


@cache
def trees() -> dict[Path, ast.Module]:
    """The tree of each file, parsed when a test asks first: a process that has no such test pays nothing."""
    gc.disable()  # it would look through the growing trees again and again, for as long as parsing takes
    try:
        found = {path: ast.parse(path.read_text(encoding="utf-8"), filename=str(path)) for path in FILES}
    finally:
        gc.enable()
    gc.freeze()
    return found


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Every node of a file, walked once for all tests that a process has."""
    return list(ast.walk(trees()[path]))


def place(path: Path, node: ast.AST | None = None) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path) for path in FILES}


def room_of(module: str) -> str | None:
    """The room of `torchmix.room.file`, or None for `torchmix` itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


@cache
def imports_of(path: Path) -> list[tuple[ast.stmt, str]]:
    """Every absolute import of a file, late and type-checking ones too, as the module it names."""
    found: list[tuple[ast.stmt, str]] = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [(node, name.name) for name in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            inner = [f"{node.module}.{name.name}" for name in node.names]
            found += [(node, each if each in MODULES else node.module) for each in inner]
    return found


def own_imports(path: Path) -> Iterator[tuple[ast.stmt, str]]:
    return ((node, name) for node, name in imports_of(path) if name.split(".")[0] == "torchmix")


def test_the_fences_see_the_package() -> None:
    assert {"torchmix.errors", "torchmix.recipe", "torchmix.cli"} <= MODULES


def test_every_room_is_on_the_map() -> None:
    rooms = {room_of(module) for module in MODULES} - {None}
    assert rooms <= set(ROOMS), "a new room needs its place in ROOMS"


def test_a_room_imports_only_rooms_above_it() -> None:
    faults = []
    for path in FILES:
        own = room_of(module_of(path))
        for node, name in own_imports(path) if own is not None else ():
            other = room_of(name)
            if other is None:
                names = {alias.name for alias in node.names} if isinstance(node, ast.ImportFrom) else {""}
                if names != {"__version__"}:
                    faults.append(f"{place(path, node)} imports torchmix itself; import the defining module")
            elif ROOMS.index(other) > ROOMS.index(own):
                faults.append(f"{place(path, node)} {own} -> {other}")
    assert not faults, "\n".join(faults)


def test_imports_name_the_defining_module() -> None:
    rooms = {name for name in MODULES if (PACKAGE / Path(*name.split(".")[1:])).is_dir()} - {"torchmix"}
    faults = [
        f"{place(path, node)} imports from the package {name}, not from the file that defines the name"
        for path in FILES
        for node, name in own_imports(path)
        if name in rooms and path.name != "__init__.py"
    ]
    assert not faults, "\n".join(faults)


def test_three_files_use_zmq() -> None:
    using = {
        path.relative_to(PACKAGE).as_posix()
        for path in FILES
        for _, name in imports_of(path)
        if name.split(".")[0] == "zmq"
    }
    assert using == {"service/server.py", "service/client.py", "service/connections.py"}


def test_one_folder_uses_ray_and_only_when_it_is_called() -> None:
    using = [(path, node) for path in FILES for node, name in imports_of(path) if name.split(".")[0] == "ray"]
    assert {path.relative_to(PACKAGE).parent.as_posix() for path, _ in using} == {"service/ray"}
    assert all(node not in trees()[path].body for path, node in using), "it is an optional package"


def test_few_rooms_know_what_the_user_wrote() -> None:
    faults = [
        f"{place(path, node)} imports Recipe; take the settings or the part that is needed of it"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and "Recipe" in {alias.name for alias in node.names}
        if (room := room_of(module_of(path))) is not None and room not in ROOMS_OF_THE_RECIPE
    ]
    assert not faults, "\n".join(faults)


def test_one_file_of_steps_opens_a_reader() -> None:
    opening = {
        path.relative_to(PACKAGE).as_posix()
        for path in FILES
        if room_of(module_of(path)) == "steps"
        for _, name in own_imports(path)
        if name in ("torchmix.reader.reader", "torchmix.reader.open_files")
    }
    assert opening == {"steps/local_steps.py"}


def test_only_the_table_knows_a_kind_of_items() -> None:
    """A kind is a folder of `modalities`, a row of its table, and a half in `recipe`; the rest asks the table."""
    kinds = {path.name for path in (PACKAGE / "modalities").iterdir() if (path / "__init__.py").exists()}
    names = {"image", "sound", "video"}
    assert kinds == {"images", "sounds", "videos"} and set(KINDS) == set(RECIPE_KINDS) == names, (
        "add the names of the new kind"
    )
    faults = []
    for path in FILES:
        file = path.relative_to(PACKAGE).as_posix()
        if file == "modalities/table.py" or any(file.startswith(f"modalities/{kind}/") for kind in kinds):
            continue
        for node, name in own_imports(path):
            if any(f"{name}.".startswith(f"torchmix.modalities.{kind}.") for kind in kinds):
                faults.append(f"{place(path, node)} imports {name}; ask modalities/table.py")
        for node in nodes(path):
            if isinstance(node, ast.Compare):
                said = [node.left, *node.comparators]
            elif isinstance(node, ast.Subscript):
                said = [node.slice]
            elif isinstance(node, ast.Call) and _name(node.func) == "get":
                said = node.args
            else:
                continue
            inside = (one for part in said for one in ast.walk(part) if isinstance(one, ast.Constant))
            if any(one.value in names for one in inside):
                faults.append(f"{place(path, node)} asks for a kind by its name: {ast.unparse(node)}")
    assert not faults, "\n".join(faults)


def test_there_are_no_relative_or_hidden_imports() -> None:
    faults = []
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and node.level:
                faults.append(f"{place(path, node)} relative import")
            hidden = isinstance(node, ast.Attribute | ast.Name | ast.alias) and _name(node) == "import_module"
            if hidden and module_of(path) != "torchmix.lazy_names":
                faults.append(f"{place(path, node)} import_module hides an import from this fence")
    assert not faults, "\n".join(faults)


def test_files_of_a_room_are_listed_in_the_order_they_import_each_other() -> None:
    faults = []
    for path in FILES:
        if path.name != "__init__.py" or path.parent == PACKAGE:
            continue
        room = module_of(path)
        listed = re.findall(r"\b(\w+)\.py\b", ast.get_docstring(trees()[path]) or "")
        present = sorted(file.stem for file in path.parent.glob("*.py") if file.stem != "__init__")
        if sorted(listed) != present:
            faults.append(f"{place(path)} lists {listed}, the folder has {present}")
            continue
        for i, stem in enumerate(listed):
            for node, name in own_imports(path.parent / f"{stem}.py"):
                if name.startswith(f"{room}.") and name.split(".")[2] in listed[i + 1 :]:
                    faults.append(f"{place(path.parent / f'{stem}.py', node)} imports {name}, which is listed below it")
    assert not faults, "\n".join(faults)


def test_only_four_packages_re_export() -> None:
    faults = [
        f"{place(path)} holds more than a docstring"
        for path in FILES
        if path.name == "__init__.py" and module_of(path) not in RE_EXPORTING and len(trees()[path].body) != 1
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", RE_EXPORTING)
def test_exported_names_are_sorted_and_importable(name: str) -> None:
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", [])
    assert list(exported) == sorted(set(exported))
    assert set(exported) <= set(dir(module)), "lazy names are listed, too"
    for each in exported:
        assert getattr(module, each) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018


def test_only_the_command_line_prints_or_sets_logging_up() -> None:
    faults = []
    for path in FILES:
        if room_of(module_of(path)) == "cli":
            continue
        words = {"print", "basicConfig", "addHandler", "setLevel"}
        if module_of(path) == "torchmix.service.main":
            words.remove("addHandler")  # a process of its own, which keeps what it warned of for its clients
        for node in nodes(path):
            if isinstance(node, ast.Call) and _name(node.func) in words:
                faults.append(f"{place(path, node)} {_name(node.func)}")
    assert not faults, "\n".join(faults)


def test_nothing_executable_is_stored_or_sent() -> None:
    faults = []
    for path in FILES:
        for node, name in imports_of(path):
            if name.split(".")[0] in BANNED_MODULES:
                faults.append(f"{place(path, node)} imports {name}")
        for node in nodes(path):
            if isinstance(node, ast.Attribute | ast.Name | ast.alias) and OBJECT_COLLECTIVE.fullmatch(_name(node)):
                faults.append(f"{place(path, node)} {_name(node)} sends pickles")
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in BANNED_CALLS or called in {"torch.load", "torch.save"}:
                    faults.append(f"{place(path, node)} calls {called}")
                if any(
                    keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False" for keyword in node.keywords
                ):
                    faults.append(f"{place(path, node)} allows pickle")
    assert not faults, "\n".join(faults)


def test_few_files_look_at_a_clock_that_may_be_set() -> None:
    """Clocks of hosts are apart, and jump: what is waited for, counted or put in order follows `time.monotonic`."""
    of_file = {f"st_{kind}time{unit}" for kind in "amc" for unit in ("", "_ns")}
    clocks = {
        "time": {"time", "time_ns", "localtime", "gmtime", "ctime"},
        "datetime": {"now", "utcnow", "today"},
        "date": {"today"},
        "path": {"getmtime", "getctime", "getatime"},
    }
    found: dict[str, Counter[str]] = {}
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.Attribute):
                name = getattr(node.value, "id", getattr(node.value, "attr", ""))
                if node.attr in of_file or node.attr in clocks.get(name, ()):
                    found.setdefault(path.relative_to(PACKAGE).as_posix(), Counter())[node.attr] += 1
    assert found == {
        "boards/board.py": {"time": 1},  # of an event, for people
        "catalog/in_store.py": {"time_ns": 3, "st_mtime_ns": 1, "st_mtime": 1},  # see `refresh`
        "cli/top.py": {"localtime": 1},  # for people
        "reader/open_files.py": {"st_mtime_ns": 1, "st_ctime_ns": 1},  # compared with those of the same file
        "storage/random_access.py": {"time_ns": 1, "st_mtime_ns": 1, "st_ctime_ns": 1},  # see `settled_statuses`
    }


def test_no_except_catches_everything() -> None:
    faults = []
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                faults.append(f"{place(path, node)} bare except")
    assert not faults, "\n".join(faults)


def test_torch_stays_below_its_line() -> None:
    faults = [
        f"{place(path, node)} imports {name}"
        for path in FILES
        for node, name in imports_of(path)
        if name.split(".")[0] in {"torch", "torchdata", "megatron"} and _must_be_torch_free(path)
    ]
    assert not faults, "\n".join(faults)


def test_what_only_plans_and_reads_imports_without_torch_and_a_node_worker_without_what_is_slow() -> None:
    modules = sorted(module_of(path) for path in FILES if _must_be_torch_free(path))
    assert {"torchmix.recipe", "torchmix.steps.worker.main"} <= set(modules)
    lines = "\n".join(f"import {name}" for name in modules)
    slow = {"yaml", "zmq", "pyarrow.compute", "http.client", "fsspec", "tokenizers"}  # the first batch waits for them
    code = (
        f"import sys, torchmix.steps.worker.main\nslow = {slow} & set(sys.modules)\nassert not slow, slow\n"
        f"{lines}\nheavy = {{'torch', 'torchdata', 'megatron'}} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 0, done.stderr


def test_no_file_names_a_place_of_one_machine() -> None:
    folders = ("torchmix", "tests", "docs", "examples", "benchmarks", ".ci")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    paths += [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    # Spelt apart, so that this file does not find itself.
    machine = re.compile("|".join((r"(?<![\w.])/" + r"work\b", r"\.\./" + "shared", "/" + "home/", "/" + "root/")))
    faults = []
    for path in paths:
        if (
            path.suffix in {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".cfg", ""}
            and "__pycache__" not in path.parts
        ):
            text = path.read_text(encoding="utf-8", errors="replace")
            faults += [f"{place(path)} names {match[0]}" for match in machine.finditer(text)]
    assert not faults, "\n".join(faults)


def _must_be_torch_free(path: Path) -> bool:
    room = room_of(module_of(path))
    file = path.relative_to(PACKAGE).as_posix()
    if file in TORCH_FILES_ABOVE or file in TORCH_FREE_FILES_BELOW:
        return file in TORCH_FREE_FILES_BELOW
    return room is None or room in TORCH_FREE_ROOMS_BELOW or ROOMS.index(room) < ROOMS.index(FIRST_ROOM_WITH_TORCH)


def _name(node: ast.AST) -> str:
    """The last name of `a.b.c`, of a bare name or of an imported one."""
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name) | ast.alias(name=name):
            return name
        case _:
            return ""
