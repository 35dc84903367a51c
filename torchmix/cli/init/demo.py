"""`torchmix init --demo`: a small corpus and its recipe, to try torchmix on.

In: a folder. Out: Parquet files and JSON lines of text that this machine has, below `data` in it, and `recipe.yaml`.
Must hold: nothing is downloaded; nothing that is there is overwritten without --force; the same Python gives the same
rows. Cost: a few seconds, some 2 MB.
"""

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

from torchmix.cli.init.recipe_yaml import write_recipe
from torchmix.cli.terminal import ExitCode, count_text, print_json
from torchmix.errors import OptionError
from torchmix.recipe.structs import RECIPE_VERSION

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --demo."""
    parser.add_argument(
        "--demo",
        nargs="?",
        const=Path(FOLDER),
        type=Path,
        metavar="FOLDER",
        help=f"make a small corpus and its recipe in a folder (default {FOLDER})",
    )


def run(arguments: argparse.Namespace) -> ExitCode:
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
        pq.write_table(table, path, compression="zstd", data_page_size=64 * 1024, write_batch_size=16)
    texts = [text for tree in trees for text in _docstrings(tree)]
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
