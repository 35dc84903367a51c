"""The pages for users against the code: code that runs, names that exist, links that lead somewhere.

Every block of Python or YAML and every command in README.md and docs/guide.md is run, as it stands, in a folder as its
reader has it.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sysconfig
import textwrap
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support.files import make_text_file, make_tokens_file, random_texts, random_tokens
from tests.support.model_folders import PICTURE_MODELS, write_model
from tests.support.processes import ROOT, Processes
from tests.test_fences import ROOMS
from torchmix.cli.main import VERBS, main
from torchmix.errors import RecipeError
from torchmix.indexing.scan import index_recipe
from torchmix.recipe.load import check_recipe, load_recipe, recipe_directory

PAGES = sorted([*ROOT.glob("*.md"), *(path for room in ("docs", "examples") for path in (ROOT / room).rglob("*.md"))])
OTHERS_NAMES = {
    *("PackedSeqParams", "MimoModel", "FileMetaData", "SchemaElement", "FirstFitPackingConfig"),
    *("LlavaImageProcessor", "LlavaNextImageProcessor", "LlavaOnevisionImageProcessor", "SiglipImageProcessor"),
    "WhisperFeatureExtractor",
}
"""Of Megatron, Parquet, Grain and transformers."""
PACKAGE_TEXT = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "torchmix").rglob("*.py"))


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """Contents of the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def page_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder in which the reader of the guide has done what it says first, of a sixth of Python's modules."""
    folder, modules = tmp_path_factory.mktemp("demo"), tmp_path_factory.mktemp("modules")
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[::6]:
        (modules / path.name).symlink_to(path)
    first = console_commands("docs/guide.md")[0]
    assert first == ["torchmix", "init", "--demo", "."]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(modules)})
        assert main(first[1:]) == 0
    return folder


def write_megatron_checkpoint(folder: Path) -> None:
    """What all ranks have in common in a checkpoint of Megatron's format torch_dist, with the arguments alone."""
    folder.mkdir(parents=True)
    kinds = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    versions = {f"{kind}_version": 1 for kind in kinds}
    (folder / "metadata.json").write_text(json.dumps(kinds | versions), encoding="utf-8")
    torch.save({"args": Namespace(torchmix_state="AAEC")}, folder / "common.pt")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with a recipe, and data where the other pages say."""
    write_megatron_checkpoint(tmp_path / "CHECKPOINTS" / "iter_0048000")
    make_text_file(tmp_path / "corpus" / "peps.parquet", random_texts(1, 400))
    for number in range(2):
        tokens = random_tokens(2 + number, 900, mean_tokens=120)
        make_tokens_file(tmp_path / "data" / f"web-{number}.parquet", tokens)
    (tmp_path / "recipe.yaml").write_text(
        "{version: 1, seed: 1, batch: {samples: 16, length: 256}, mixture: {web: 70%, peps: 30%}, sources: {"
        "web: {path: 'data/web-*.parquet', tokens: input_ids}, peps: {path: corpus/peps.parquet, text: text, "
        "tokenizer: bytes}}}",
        encoding="utf-8",
    )
    return tmp_path


def console_commands(page: str) -> list[list[str]]:
    return [
        shlex.split(line.removeprefix("$ "), comments=True)
        for block in blocks(text_of(page), "console")
        for line in block.splitlines()
    ]


def test_the_readme_fits_a_screen_or_three_and_the_front_page_begins_alike() -> None:
    text = text_of("README.md")
    assert len(text.splitlines()) <= 150
    first, sentence = text.split("\n\n")[:2]
    assert text_of("docs/index.md").startswith(f"{first}\n\n{sentence}\n")
    assert console_commands("docs/index.md") == console_commands("README.md")
    [tab] = re.findall(r"^    ```python\n(.*?)^    ```", text_of("docs/index.md"), re.MULTILINE | re.DOTALL)
    assert [textwrap.dedent(tab)] == blocks(text, "python"), "the tab of the front page is the snippet that is run"
    [recipe] = re.findall(r"^    ```yaml\n(.*?)^    ```", text_of("docs/index.md"), re.MULTILINE | re.DOTALL)
    check_recipe(yaml.safe_load(recipe))


def test_the_three_commands_of_the_readme_end_in_a_batch_of_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_text_file(tmp_path / "data" / "peps.parquet", random_texts(1, 400))
    monkeypatch.chdir(tmp_path)
    commands = console_commands("README.md")
    assert [command[:2] for command in commands] == [["torchmix", verb] for verb in ("init", "index", "show")]
    for command in commands:
        assert main(command[1:]) == 0, command
    printed = capsys.readouterr().out
    [shown] = blocks(text_of("README.md"), "text")
    title, header = (
        next(line.split() for line in shown.splitlines() if line.startswith(word)) for word in ("step", "source")
    )
    lines = [line.split() for line in printed.splitlines()]
    assert header in lines, "the table of show has other columns"
    assert any(line[:-1] == title[:-1] for line in lines), "the sizes that init chooses are others"


def test_the_recipe_of_the_guide_is_short_and_is_the_one_that_the_demonstration_has(demo: Path) -> None:
    [shown] = blocks(text_of("docs/guide.md"), "yaml")
    assert len(shown.splitlines()) <= 15
    written = (demo / "recipe.yaml").read_text(encoding="utf-8")
    without_comment = "".join(line for line in written.splitlines(True) if not line.startswith("#"))
    assert without_comment == shown
    recipe = load_recipe(demo / "recipe.yaml")
    index_recipe(recipe, recipe_directory(demo / "recipe.yaml"))


@pytest.mark.system
def test_the_python_of_every_page_runs_as_it_stands(job: Path, demo: Path) -> None:
    """The first of the README in an interpreter of its own, as its reader runs it; the others one after the other.

    Those of the tutorial are run by test_tutorial.py.
    """
    snippets = [
        (page_name(page), block)
        for page in PAGES
        if page.name != "tutorial.md"
        for block in blocks(page.read_text(encoding="utf-8"), "python")
    ]
    first = ("README.md", "docs/guide.md")
    snippets.sort(key=lambda snippet: first.index(snippet[0]) if snippet[0] in first else len(first))
    assert [name for name, _ in snippets[:2]] == list(first) and len(snippets) > 10
    with Processes(job) as processes:
        for part, start in ((snippets[:1], processes.start_python), (snippets[1:], processes.fork_python)):
            folders = [demo if name in first else job for name, _ in part]
            programs = [(name, str(folder), text) for (name, text), folder in zip(part, folders, strict=True)]
            child = start("-c", f"{RUN_ALL}\nrun_all({programs!r})", environment=WITHOUT_COMPILER)
            assert child.wait(deadline_s=240) == 0, child.report()
            printed = child.stdout().split(MARK)
            assert len(printed) == len(part) + 1, child.report()
            silent = {name for (name, _), text in zip(part, printed, strict=False) if not text.strip()}
            assert silent <= {"docs/strategies.md"}, "functions alone, by which test_runs_by_strategy plans"


WITHOUT_COMPILER = {"TORCHDYNAMO_DISABLE": "1"}
"""No snippet compiles anything, but Megatron imports torch's compiler where it can."""
MARK = "--- the end of a snippet"
RUN_ALL = f"""
import os

def run_all(programs):
    for name, folder, text in programs:
        os.chdir(folder)
        exec(compile(text, name, "exec"), {{"__name__": "__main__"}})
        print({MARK!r}, flush=True)
"""
"""A program that runs snippets, each with names of its own, and prints a mark after each; an error names the page."""


def test_the_commands_of_the_guide_run(
    demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(demo)
    commands = console_commands("docs/guide.md")[1:]
    assert [command[:2] for command in commands] == [["torchmix", verb] for verb in ("index", "check", "plan", "show")]
    for command in commands:
        assert main(command[1:]) == 0, command
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert (demo / "plan" / "pieces.parquet").exists() and (demo / "plan" / "steps.parquet").exists()
    [shown] = blocks(text_of("docs/guide.md"), "text")
    labels = [line.split()[0] for line in shown.splitlines()[1:] if line.strip()]
    header = next(line.split() for line in shown.splitlines() if line.startswith("source"))
    assert header in printed, "the table of plan has other columns"
    assert {"fill", "balance", "deferred", "planning", "digest"} <= set(labels) & {line[0] for line in printed if line}
    assert main(["show", "recipe.yaml", "--source", "docs", "--rows", "0:2"]) == 0, "what its comment says"


def test_every_make_command_of_the_readme_is_one() -> None:
    text = text_of("README.md")
    lines = re.findall(r"^(?: {4})?(make [^#\n]+?) *(?:#.*)?$", text, re.MULTILINE)
    assert {"make train", "make test"} <= set(lines) and len(lines) >= 5
    for line in lines:
        command = shlex.split(line)
        assert subprocess.run([*command, "--dry-run"], cwd=ROOT, capture_output=True, check=False).returncode == 0, line


OUTSIDE = (
    *(
        "recipe.yaml",
        "manifest.json",
        "plan.json",
        "profile.json",
        "metadataset.yaml",
        "shares.yaml",
        "old.yaml",
        "edited.yaml",
    ),
    *("tokenizer.json", "tokenizer_config.json", "model/tokenizer_config.json", "config.json"),
    *("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
    *(
        "train.py",
        "pretrain_gpt.py",
        "pretrain_vlm.py",
        "examples/multimodal/train.py",
        "examples/mimo/train.py",
        "pretrain_mimo.py",
        "sitecustomize.py",
        "__init__.py",
    ),
)
"""Files that pages name, and that users have."""


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_verb_and_file_and_class_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    code = [*re.findall(r"`([^`\n]+)`", text), *blocks(text, "console"), *blocks(text, "text")]
    faults = []
    for part in code:
        verbs = re.findall(r"(?:^|\$ )torchmix (\w+)", part, re.MULTILINE)
        faults += [f"torchmix {verb}" for verb in verbs if verb not in dict(VERBS)]
        for name in re.findall(r"[\w./]+\.(?:py|md|yaml|json)\b", part):
            folders = (page.parent, ROOT, ROOT / "torchmix", ROOT / "torchmix" / "parallel")
            outside = "NAME" in name or name in OUTSIDE
            if not outside and not any((folder / name).exists() for folder in folders):
                faults.append(name)
        if re.fullmatch(r"(?:[A-Z][a-z]+){2,}", part) and part not in OTHERS_NAMES:
            faults += [part] if f"class {part}" not in PACKAGE_TEXT else []
    assert not faults, f"{page_name(page)} names what does not exist: {faults}"


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_folder_that_the_architecture_names_exists() -> None:
    folders = re.findall(r"`([\w./]+/)`", text_of("docs/architecture.md"))
    assert {"torchmix/", "steps/worker/"} <= set(folders)
    missing = [folder for folder in folders if not any((at / folder).is_dir() for at in (ROOT, ROOT / "torchmix"))]
    assert not missing, missing


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    faults = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        if not path.exists() or (anchor and anchor not in anchors(path.read_text(encoding="utf-8"))):
            faults.append(target)
    assert not faults, f"{page_name(page)}: {faults}"


def test_the_rooms_of_the_architecture_are_those_of_the_fences() -> None:
    text = text_of("docs/architecture.md")
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", text[text.index("## Rooms") :], re.MULTILINE)
    assert [room for room, _ in rows[: len(ROOMS)]] == list(ROOMS)
    planned = {room for room, gives in rows if gives.startswith("not built yet")}
    package = ROOT / "torchmix"
    built = {room for room in ROOMS if (package / room).is_dir() or (package / f"{room}.py").exists()}
    assert planned == set(ROOMS) - built


def test_the_glossary_names_each_thing_once() -> None:
    own = text_of("docs/glossary.md").split("## Megatron")[0]
    words = [
        word.strip() for row in re.findall(r"^\| ([^|`]+) \| [^|]+ \|$", own, re.MULTILINE) for word in row.split(",")
    ]
    words = [word for word in words if word not in ("word", "")]
    assert len(words) == len(set(words)), sorted(word for word in words if words.count(word) > 1)
    assert {"page", "window", "piece", "sample", "pool", "leader", "peer", "decision"} <= set(words)


def test_the_changelog_names_the_frozen_versions() -> None:
    frozen = re.findall(r"^\| `([A-Z]+)` \| (\d+) \|", text_of("docs/formats.md"), re.MULTILINE)
    changelog = text_of("CHANGELOG.md")
    assert frozen
    for tag, version in frozen:
        assert f"`{tag} {version}`" in changelog


PRESENT = ("web", "german", "books", "peps", "pubmed", "code", "query")
AROUND: dict[str, Any] = {
    "version": 1,
    "seed": 1,
    "batch": {"samples": 8, "length": 256},
    "sources": {name: {"path": f"{name}.parquet", "tokens": "input_ids"} for name in PRESENT},
    "mixture": {
        "text": {"share": "80%", "children": {"web": 4, "german": 1, "rest": {"share": 1, "children": {"books": 1}}}},
        "code": "20%",
    },
}
"""The recipe that a page's keys go into, where a block has some of them alone."""


def test_yaml_in_the_pages_is_a_recipe_or_keys_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "models" / "Qwen2-VL-2B", PICTURE_MODELS["Qwen2-VL"])
    (tmp_path / "anneal.yaml").write_text("{mixture: {web: 50%, code: 50%}}", encoding="utf-8")
    faults, checked = [], 0
    for page in PAGES:
        for block in re.findall(
            r"^( *)```yaml\n(.*?)^\1```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        ):
            values = yaml.safe_load(textwrap.dedent(block[1]))
            recipe = AROUND | values
            if "sources" in values and "mixture" not in values:
                recipe["mixture"] = dict.fromkeys(values["sources"], 1)
            if "modules" in values and "sources" not in values:
                recipe["mixture"] = {"query": 1, "web": 1}
            named = set(re.findall(r"\w+", json.dumps(recipe["mixture"])))
            recipe["sources"] = {
                name: source for name, source in recipe["sources"].items() if "sources" in values or name in named
            }
            try:
                (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
                load_recipe(tmp_path / "recipe.yaml")
            except RecipeError as error:
                faults.append(f"{page_name(page)}: {sorted(values)}: {error}")
            checked += 1
    assert not faults, "\n".join(faults)
    assert checked > 25


def test_what_trains_needs_no_tools_of_tests(tmp_path: Path) -> None:
    for target, extras in (("train", "[megatron]"), ("test", "[megatron,test,check]")):
        command = ["make", "--dry-run", target, f"VENV={tmp_path / 'venv'}"]
        lines = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.splitlines()
        assert [line for line in lines if "--editable" in line][-1].endswith(f"--editable '.{extras}'")
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    of_core, of_extras = setup.split("extras_require")
    assert not re.findall(r'"(ruff|mypy|pytest|moto|flask)', of_core)
    [megatron] = re.findall(r'"megatron": (.*),', of_extras)
    assert megatron == '["megatron-core>=0.16,<0.17"]'
