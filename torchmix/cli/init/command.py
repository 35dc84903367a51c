"""`torchmix init`: a recipe for files that a team has, for a blend of Megatron's, or a demonstration."""

from __future__ import annotations

import argparse
import ast
import json
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from torchmix.cli.init import from_files, megatron
from torchmix.cli.init.recipe_yaml import write_recipe
from torchmix.cli.terminal import ExitCode, add_explain, at_least, count_text, print_json
from torchmix.errors import OptionError, naming
from torchmix.recipe.structs import RECIPE_VERSION

# --- `torchmix init --demo`: a small corpus and its recipe, to try torchmix on.
#
# Cost: a few seconds, some 2 MB.

FOLDER = "torchmix-demo"
LONGEST_MODULE = 64 * 1024
"""Characters; one of more would fill many steps of a small run."""
RECIPE = f"""\
# Written by `torchmix init --demo`: modules of Python's library, and their docstrings.
version: {RECIPE_VERSION}
seed: 1234
batch: {{samples: 64, length: 1024}}            # a global batch: samples x tokens
catalog: ./catalog                            # where the index lies
sources:                                      # a name is an identity; their order does not matter
  code: {{path: "data/code-*.parquet", text: text, tokenizer: bytes}}
  docs: {{path: data/docs.jsonl, text: text, tokenizer: bytes, max_epochs: 4, on_exhausted: renormalise}}
mixture: {{code: 70%, docs: 30%}}               # shares of trained tokens
packing: {{method: best_fit, overflow: split, boundaries: document, align_tokens: 8}}
balance: {{method: rows, model: {{layers: 32, hidden: 4096, ffn: 11008, heads: 32}}}}
shuffle: {{window_pages: 256, window_bytes: 64MiB}}
read: {{cache: 1GiB}}                           # decoded pages kept; no part of the order
"""


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --demo."""
    parser.add_argument(
        "--demo",
        nargs="?",
        const=Path(FOLDER),
        type=Path,
        metavar="FOLDER",
        help=f"make a small corpus and its recipe in a folder (default {FOLDER})",
    )


def run_demo(arguments: argparse.Namespace) -> ExitCode:
    """Write corpus and recipe.

    Raises:
        OptionError: Some of it is there already.
    """
    folder: Path = arguments.demo
    recipe = folder / "recipe.yaml"
    code, docs = [folder / "data" / f"code-{number}.parquet" for number in range(2)], folder / "data" / "docs.jsonl"
    there = [path for path in (recipe, *code, docs) if path.exists()]
    if there and not arguments.force:
        raise OptionError(f"{there[0]} exists; name another folder with --demo FOLDER, or overwrite it with --force")
    (folder / "data").mkdir(parents=True, exist_ok=True)
    modules, trees = zip(*_modules(Path(sysconfig.get_paths()["stdlib"])), strict=True)
    short = [module for module in modules if len(module) <= LONGEST_MODULE]
    for number, path in enumerate(code):
        table = pa.table({"text": pa.array(short[number::2], pa.string())})
        with naming(path):
            pq.write_table(table, path, compression="zstd", data_page_size=64 * 1024, write_batch_size=16)
    texts = [text for tree in trees for text in _docstrings(tree)]
    with naming(docs):
        docs.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    write_recipe(recipe, RECIPE)
    if arguments.json:
        print_json({"recipe": str(recipe), "sources": {"code": len(short), "docs": len(texts)}})
    else:
        print(f"{folder / 'data'}: {count_text(len(short))} modules and {count_text(len(texts))} docstrings")
        print(f"{recipe} is written; next: torchmix index {recipe}, then torchmix check {recipe}")
    return ExitCode.OK


def _modules(root: Path) -> Iterator[tuple[str, ast.Module]]:
    """Source and syntax tree of each module in a folder, by name."""
    for path in sorted(root.glob("*.py")):
        with warnings.catch_warnings(), suppress(OSError, ValueError, SyntaxError):
            warnings.simplefilter("ignore")  # old modules have escapes that Python warns of
            source = path.read_text(encoding="utf-8")
            yield source, ast.parse(source)


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


# --- `torchmix init`: a recipe for files that a team has, for a blend of Megatron's, or a demonstration.

HELP = "write a recipe for data files, for a blend of Megatron's, or for a demonstration"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this verb beside --json."""
    from_files.add_arguments(parser)
    megatron.add_arguments(parser)
    add_demo_arguments(parser)
    parser.add_argument("--seq-length", type=at_least(2), metavar="N", help="tokens of a sample")
    parser.add_argument("--global-batch-size", type=at_least(1), metavar="N", help="samples of a step, of all ranks")
    parser.add_argument("--split", help="of every source, as 99,1,0 (with Megatron's flags its default, 969, 30, 1)")
    parser.add_argument("--seed", type=at_least(0), default=1234, metavar="N", help="default 1234")
    parser.add_argument("--out", dest="recipe", type=Path, default=Path("recipe.yaml"), metavar="FILE")
    parser.add_argument("--force", action="store_true", help="overwrite FILE")
    add_explain(parser)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Write the recipe.

    Raises:
        OptionError: Flags that say nothing, or two things, or a file that is there already.
        SourceUnreadable: Files that are missing, or cannot be read.
    """
    ways = {
        "files": bool(arguments.files),
        "--demo": arguments.demo is not None,
        "--from-megatron": megatron.has_blend(arguments),
    }
    given = [way for way, is_given in ways.items() if is_given]
    if not given:
        raise OptionError(
            "init needs to be told where data is: `torchmix init data/*.parquet` (files, folders, globs, hf:// and "
            "other URIs), a blend of Megatron's as --from-megatron takes it, or --demo for a small corpus"
        )
    if len(given) > 1:
        raise OptionError(f"{' and '.join(given)} name different data; give one of them")
    if arguments.files:
        return from_files.run(arguments)
    return run_demo(arguments) if arguments.demo is not None else megatron.run(arguments)
