"""The command line: exit codes, one clear message, and nothing heavy imported."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.deadlines import LONG_S
from tests.support.projects import make_project
from torchmix import __version__
from torchmix.cli import run
from torchmix.cli.main import _parsers, command_parser, main


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required"),
        (["server", "recipe.yaml"], "there is no verb 'server' (did you mean 'serve'?)"),
        (["plan", "recipe.yaml"], "--steps"),
        (["plan", "recipe.yaml", "--steps", "0"], "0 is less than 1"),
        (["plan", "recipe.yaml", "--steps", "many"], "'many' is not a whole number"),
        (["plan", "recipe.yaml", "--steps", "1", "--start", "-1"], "-1"),
        (["check", "recipe.yaml", "--out", "x"], "torchmix check: there is no option '--out'"),
        (["plan", "recipe.yaml", "--step", "5", "--one-pass"], "no option '--step' (did you mean '--steps'?)"),
        (["plan", "recipe.yaml", "--step=5", "--one-pass"], "no option '--step' (did you mean '--steps'?)"),
        (["check", "recipe.yaml", "more"], "torchmix check: there is no argument 'more' to take"),
    ],
)
def test_wrong_usage_is_exit_code_2(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_help_and_version_are_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"torchmix {__version__}\n"
    for verb in ("check", "index", "plan", "show"):
        assert main([verb, "--help"]) == 0
        assert "exit codes: 0 ok, 1 findings, 2 usage or recipe, 3 data" in capsys.readouterr().out


@pytest.mark.parametrize("verb", [["check"], ["index"], ["plan", "--steps", "1"]])
def test_a_fault_in_the_recipe_is_one_line_with_its_place(
    tmp_path: Path, verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_project(tmp_path, ("seed: 5", "sead: 5"))
    assert main([*verb, str(recipe)]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"torchmix: {recipe}: line 2: sead: unknown key (did you mean 'seed'?)")
    assert output.err.count("\n") == 1


@pytest.mark.parametrize("verb", [["check"], ["index"], ["plan", "--steps", "1"]])
def test_with_json_a_fault_is_an_object_too(
    tmp_path: Path, verb: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_project(tmp_path, ("79%", "80%"))
    assert main([*verb, str(recipe), "--json"]) == 2
    output = capsys.readouterr()
    values = json.loads(output.out)
    assert values["exit_code"] == 2
    assert values["error"]["kind"] == "RecipeError"
    assert (values["error"]["where"], values["error"]["line"]) == ("mixture", 8)
    assert "101%" in output.err


def test_a_recipe_that_is_not_there_is_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "gone.yaml")]) == 2
    assert "gone.yaml': No such file or directory" in capsys.readouterr().err


def test_ctrl_c_ends_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "load_recipe", interrupted)
    assert main(["plan", str(tmp_path / "recipe.yaml"), "--steps", "1"]) == 130
    assert capsys.readouterr() == ("", "")


def test_what_the_system_refuses_is_exit_code_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_project(tmp_path)
    assert main(["index", str(recipe)]) == 0
    (tmp_path / "out").write_text("a file, not a folder")
    assert main(["plan", str(recipe), "--steps", "1", "--out", str(tmp_path / "out")]) == 3
    assert capsys.readouterr().err.endswith(f"torchmix: {tmp_path / 'out'}: is a file; name a folder for the plan\n")


def test_a_bug_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(run, "load_recipe", broken)
    with pytest.raises(ZeroDivisionError):
        main(["plan", str(tmp_path / "recipe.yaml"), "--steps", "1"])


@pytest.mark.slow
def test_output_that_nobody_reads_to_the_end_is_no_error(tmp_path: Path) -> None:
    recipe = make_project(tmp_path)
    assert main(["index", str(recipe)]) == 0
    code = "import sys, torchmix.cli.main as m; sys.exit(m.main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "plan", str(recipe), "--steps", "1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=LONG_S) == 0


def test_an_interrupt_while_it_imports_has_no_traceback() -> None:
    code = """
import sys
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "pyarrow":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from torchmix.cli.start import start
sys.exit(start())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG_S)
    assert (done.returncode, done.stderr) == (130, "")


def test_the_package_imports_its_names_when_they_are_used() -> None:
    code = """
import sys, torchmix
assert not {"numpy", "msgspec", "torch"} & set(sys.modules)
assert all(getattr(torchmix, name) for name in ("Recipe", "Topology", "Source"))
assert torchmix.parallel.Topology is torchmix.Topology
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=LONG_S)
    subprocess.run([sys.executable, "-c", "import torchmix; torchmix.parallel.Topology"], check=True, timeout=LONG_S)


def test_no_parser_takes_part_of_an_option() -> None:
    assert all(not one.allow_abbrev for one in _parsers(command_parser()))


def test_the_command_line_does_without_torch() -> None:
    code = "import sys, torchmix.cli.main\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 0, done.stderr


def test_bash_completes_verbs_options_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["--print-completion", "bash"]) == 0
    (tmp_path / "completion.bash").write_text(capsys.readouterr().out, encoding="utf-8")
    (tmp_path / "recipe.yaml").touch()

    def completed(*words: str) -> set[str]:
        listed = " ".join(f"'{word}'" for word in words)
        script = (
            f"source completion.bash; COMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; "
            f"COMP_LINE='{' '.join(words)}'; "
            "function=$(complete -p torchmix | sed 's/.*-F \\([^ ]*\\).*/\\1/'); "
            "$function; printf '%s\\n' \"${COMPREPLY[@]}\""
        )
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=LONG_S, check=True
        )
        return set(done.stdout.split())

    assert completed("torchmix", "che") == {"check"}
    assert "--steps" in completed("torchmix", "plan", "--st")
    assert "recipe.yaml" in completed("torchmix", "check", "rec")


def test_without_shtab_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "bash"]) == 2
    assert "pip install shtab" in capsys.readouterr().err


@contextmanager
def no_room() -> Iterator[None]:
    """No file may grow, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_without_room_is_named_with_the_file_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, full = str(make_project(tmp_path)), tmp_path / "full"
    full.mkdir()
    assert main(["index", recipe, "--quiet"]) == 0
    calls = {
        "plan": ["plan", recipe, "--steps", "3", "--out", f"{full}/plan"],
        "page.html": ["show", recipe, "--step", "0", "--html", f"{full}/page.html"],
        "found.parquet": ["trace", recipe, "--step", "0", "--out", f"{full}/found.parquet"],
        "deny.parquet": ["trace", recipe, "--step", "0", "--deny-from", f"{full}/deny.parquet"],
        "recipe.yaml": ["init", f"{tmp_path}/code.parquet", "--tokenizer", "bytes", "--out", f"{full}/recipe.yaml"],
        "keys/server.public": ["keys", f"{full}/keys"],
    }
    for name, words in calls.items():
        capsys.readouterr()
        with no_room():
            assert main(words) == 3, words
        assert capsys.readouterr().err.splitlines()[-1] == f"torchmix: {full / name}: File too large"
    assert not [path for path in full.rglob("*") if path.is_file()]
    for words in calls.values():
        assert main(words) == 0, words
