"""Trial: the example's dataloader against the signatures of a checkout of torchtitan, as of its main.

    python -m tests.trials.torchtitan_main CHECKOUT --out torchtitan_main.json

CHECKOUT is a working tree, or a git directory, of which HEAD is read. Its source is read as text, and not run: the
methods of `BaseDataLoader`, the type of its batches, and what the Trainer tells a dataloader when it builds it. The
example is built on a stand-in with just these names, is told just that, gives four steps, and goes on from a state.
Whatever the example does not have, does not know or gives otherwise is listed under `wrong`.

Training on two ranks by that checkout: after `make test-examples`, give `.venv-examples` the grain that its
pyproject.toml names, and run `PYTHONPATH=CHECKOUT .venv-examples/bin/python -m pytest tests/examples/test_trainers.py`.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import torchmix
from tests.support.example import EXAMPLE, example_module
from tests.support.files import make_text_file, random_texts

LENGTH, SAMPLES, SIZE, STEPS = 32, 4, 2, 4
LOADERS = ("torchtitan/components/data/loader.py", "torchtitan/components/dataloader.py")
"""Where the base class lies: in main, and up to 0.3."""
TOLD = {
    "dp_world_size": 1,
    "dp_rank": 0,
    "tokenizer": None,
    "seq_len": LENGTH,
    "local_batch_size": SIZE,
    "snapshot_every_n_steps": None,
    "max_context_length": LENGTH,
    "num_tokens_per_batch": SIZE * LENGTH,
}
"""What each keyword means for the recipe of the trial."""
FLAT = "num_tokens_per_batch"
"""Told by a torchtitan whose batches have no axis of samples."""
BATCH = "tuple[dict[str,"


def read(checkout: Path, path: str) -> str | None:
    """A file of the checkout; None where it has none."""
    if (checkout / "torchtitan").is_dir():
        return (checkout / path).read_text(encoding="utf-8") if (checkout / path).is_file() else None
    shown = subprocess.run(["git", "-C", str(checkout), "show", f"HEAD:{path}"], capture_output=True, check=False)
    return shown.stdout.decode() if shown.returncode == 0 else None


def methods_of(source: str) -> list[str]:
    """The methods of the base class."""
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    [base] = [each for each in classes if each.name == "BaseDataLoader"]
    return [node.name for node in base.body if isinstance(node, ast.FunctionDef)]


def keywords_of(trainer: str) -> list[str]:
    """What the Trainer tells `config.dataloader.build`."""
    calls = [node for node in ast.walk(ast.parse(trainer)) if isinstance(node, ast.Call)]
    [call] = [each for each in calls if ast.unparse(each.func) == "config.dataloader.build"]
    return [each.arg or "**" for each in call.keywords]


def type_of_batches(checkout: Path, source: str) -> str:
    """What `BaseDataLoader.__iter__` gives, with the alias of main resolved."""
    collators = read(checkout, "torchtitan/components/data/collators.py") or ""
    for node in ast.parse(collators).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "TrainerBatch" and node.value is not None:
            return ast.unparse(node.value)
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return next((ast.unparse(each.returns) for each in found if each.name == "__iter__" and each.returns), "")


@contextmanager
def example_on(loader: str) -> Iterator[Any]:
    """The example's class, where torchtitan has nothing but a base class in this file."""

    class BaseDataLoader:
        @dataclass(kw_only=True, slots=True)
        class Config:
            """Nothing to choose."""

    names = loader.removesuffix(".py").split("/")
    modules = {".".join(names[: end + 1]): ModuleType(names[end]) for end in range(len(names))}
    modules[".".join(names)].BaseDataLoader = BaseDataLoader  # type: ignore[attr-defined]
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "torchtitan"}
    hidden |= {name: sys.modules.pop(name) for name in ("dataloader",) if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield example_module("dataloader", EXAMPLE.parent / "torchtitan").TorchmixDataLoader
    finally:
        for name in [*modules, "dataloader"]:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)


def differences(example: Any, told: dict[str, Any], recipe: str) -> list[str]:
    """What the example gives otherwise than the plan of the recipe, in the form of this torchtitan."""
    with torchmix.build_loader(recipe, micro_batch_size=SIZE, max_steps=STEPS) as loader:
        plan = [(each.tokens, each.position_ids, each.labels, each.loss_mask) for each in loader]
    config = example.Config(recipe=recipe, max_steps=STEPS)
    first, second = example(config, **told), example(config, **told)
    found = []
    for batch in first:
        found.append(batch)
        if len(found) == len(plan) // 2:
            break
    second.load_state_dict(first.state_dict())
    found += list(second)
    first.close()
    second.close()
    wrong = [] if len(found) == len(plan) else [f"{len(found)} batches, not {len(plan)}"]
    for number, ((given, labels), (tokens, positions, planned, mask)) in enumerate(zip(found, plan, strict=False)):
        expected = {"input": tokens, "positions": positions, "labels": planned.masked_fill(mask == 0, -100)}
        tensors = {**given, "labels": labels}
        if tensors.keys() != expected.keys():
            wrong.append(f"batch {number}: {sorted(tensors)}")
            continue
        for name, tensor in expected.items():
            if not torch.equal(tensors[name], tensor.flatten() if FLAT in told else tensor):
                wrong.append(f"batch {number}: {name} {tuple(tensors[name].shape)} is not that of the plan")
    return wrong


def run(checkout: Path) -> dict[str, Any]:
    """What the checkout has, and what is wrong with the example on it."""
    trainer = read(checkout, "torchtitan/trainer.py")
    sources = {path: source for path in LOADERS if (source := read(checkout, path)) is not None}
    if trainer is None or not sources:
        raise SystemExit(f"{checkout}: no torchtitan/trainer.py, or none of {', '.join(LOADERS)}; give a checkout")
    loader, source = next(iter(sources.items()))
    methods, keywords, batches = methods_of(source), keywords_of(trainer), type_of_batches(checkout, source)
    wrong = [f"{name} is told, with a meaning that is not known" for name in keywords if name not in TOLD]
    if BATCH not in batches:
        wrong.append(f"batches are {batches}")
    with tempfile.TemporaryDirectory() as folder, example_on(loader) as example:
        wrong += [f"{name} is no method of the example" for name in methods if not hasattr(example, name)]
        make_text_file(Path(folder, "prose.parquet"), random_texts(1, 100))
        recipe = Path(folder, "recipe.yaml")
        recipe.write_text(
            f"{{version: 1, seed: 1, batch: {{samples: {SAMPLES}, length: {LENGTH}}}, mixture: {{prose: 100%}}, "
            "loaders: {where: in_process}, sources: {prose: {path: prose.parquet, text: text, tokenizer: bytes}}}",
            encoding="utf-8",
        )
        try:
            wrong += differences(example, {name: TOLD.get(name) for name in keywords}, str(recipe))
        except (TypeError, KeyError, ValueError) as error:
            wrong.append(f"the example fails: {type(error).__name__}: {error}")
    return {"loader": loader, "methods": methods, "told": keywords, "batches": batches, "wrong": wrong}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--out", type=Path, default=Path("torchtitan_main.json"))
    asked = parser.parse_args()
    found = run(asked.checkout)
    asked.out.write_text(json.dumps(found))
    print(found)
    sys.exit(bool(found["wrong"]))


if __name__ == "__main__":
    main()
