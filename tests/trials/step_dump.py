"""What random recipes plan and hand out, bit for bit: two commits that should behave alike are compared by it.

    python -m tests.trials.step_dump --seed 1 --count 60 --out after
    python -m tests.trials.step_dump --seed 1 --count 60 --out after --same-as before --but state

In: a seed and a number of recipes. Out: a folder with a JSON for each recipe. A recipe is run in legs, each from the
bytes of the state before it, at another layout or after an edit; a leg has the order and the plan of each step, every
field of every microbatch of every rank, the decisions, and the state. `--same-as` names the first value that differs;
`--but state` leaves out the bytes of states, where a commit alters them. Must hold: public names and `tests.support`
alone, so the same script runs at both commits. The files and the recipe of a leg have a digest of their own, which
says whether the generator changed, or the product. A dump goes on where it stopped. `--native 1` and `--native
0` dump with the native library and without, `--native turns` changes between both at the begin of each leg and, where
steps are planned alone, after random steps; the three dumps must be equal. Cost: three seconds a recipe.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

import torchmix
from tests.support.edited_worlds import VALIDATION, World, facts_of_state, make_world, state_of
from tests.support.loaders import FIELDS, Rank, run_job, write_job
from tests.support.native import use_native
from tests.support.random_projects import random_balance, write_formats, write_images, write_mixture

SHAPES = ("life", "mixture", "formats", "images", "life", "formats", "mixture", "policy", "life", "images")
"""Among ten recipes. A life is a recipe that is edited."""
EDITS = ("shares", "schedule", "stage", "add_source", "remove_source", "add_file", "where", "add_selection", "deny")
EDITS += ("deny", "add_file", "epochs", "remove_selection", "flat_add", "undo")
LAYOUTS: tuple[dict[str, int], ...] = (
    {},
    {"dp": 2},
    {"tp": 2},
    {"cp": 2},
    {"pp": 2},
    {"tp": 2, "dp": 2},
    {"cp": 2, "dp": 2},
    {"pp": 2, "dp": 2},
)
OF_MODULE = ("units", "rows", "cu_seqlens", "cu_rows", "max_seqlen", "places", "cp_rank")
OF_ROUTES = ("sends", "receives", "num_rows")
OF_ROWS = ("values", "lengths", "places")
NUMBERS = ("num_tokens_global", "max_seqlen", "is_last_of_step", "cp_ranks")
ACCEPTED = re.compile(r"accept_edit='([0-9a-f]{16})'")
MADE = {"catalog", "decisions", "__pycache__"}
"""Folders of a project that torchmix writes."""


WAYS: dict[str, random.Random] = {}
"""Where the native library is used by turns: what says when, under `turns`."""


def take_turns() -> None:
    """Use the native library from here on, or do without."""
    if "turns" in WAYS:
        use_native(WAYS["turns"].random() < 0.5)


def digest(value: Any) -> str:
    """16 hex digits over a tensor with its type and shape, or over plain values."""
    found = hashlib.sha256()
    if isinstance(value, torch.Tensor):
        found.update(f"{value.dtype} {tuple(value.shape)}".encode() + value.contiguous().numpy().tobytes())
    else:
        found.update(value if isinstance(value, bytes) else repr(value).encode())
    return found.hexdigest()[:16]


def inputs_of(folder: Path) -> str:
    """A digest of all files of a project but those that torchmix writes."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder) for path in paths]
    return digest([(str(n), digest((folder / n).read_bytes())) for n in names if not MADE & {*n.parts}])


def fields_of(microbatch: torchmix.Microbatch) -> dict[str, str]:
    """A digest of each field."""
    found = {name: digest(getattr(microbatch, name)) for name in (*FIELDS, *NUMBERS)}
    for name, lists in sorted(microbatch.rows.items()):
        found |= {f"rows.{name}.{field}": digest(getattr(lists, field)) for field in OF_ROWS}
    for name, batch in sorted(microbatch.modules.items()):
        found |= {f"{name}.{field}": digest(getattr(batch, field)) for field in OF_MODULE}
        found |= {f"{name}.routes.{field}": digest(getattr(batch.routes, field)) for field in OF_ROUTES}
        found |= {f"{name}.arrays.{field}": digest(array) for field, array in sorted(batch.arrays.items())}
        if "grid_thw" in batch.arrays:
            try:
                found[f"{name}.mrope"] = digest(microbatch.mrope_position_ids(name))
            except torchmix.OptionError as error:
                found[f"{name}.mrope"] = type(error).__name__
    return found


def run_leg(
    recipe: Path,
    layout: Mapping[str, int],
    *,
    state: dict[str, Any] | None = None,
    steps: int,
    inside: bool = False,
    losses: bool = False,
    **options: Any,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Run a job for some steps.

    Args:
        recipe: Its path.
        layout: Sizes of axes.
        state: Where it begins.
        steps: How many.
        inside: End after the first microbatch of the last step, if it has several.
        losses: Report losses of each step.
        options: The options of `build_loader`.

    Returns:
        What is dumped of it, and the state after it; None if it did not begin.
    """

    def program(loader: torchmix.StatefulDataLoader, rank: Rank) -> None:
        rank.result = found = {"tensors": {}, "plan": {}, "end": ""}
        try:
            if state is not None:
                _load(loader, state)
            for microbatch in loader:
                where = f"step {microbatch.step} microbatch {microbatch.index}"
                found["tensors"][where] = fields_of(microbatch)
                if not microbatch.is_last_of_step:
                    facts = facts_of_state(loader.state_dict()["torchmix_state"])
                    found["plan"][f"step {microbatch.step}"] = facts["plan"]
                    if inside and len(rank.digests) == steps - 1:
                        return
                    continue
                rank.digests.append(loader.order_digest)
                if losses:
                    told = {name: (1.0 + (microbatch.step * place) % 7, 60) for place, name in enumerate(LOSSES)}
                    loader.report(microbatch.step, told)
                if len(rank.digests) == steps:
                    return
        except torchmix.TorchmixError as error:
            found["end"] = type(error).__name__

    about: dict[str, Any] = {"inputs": inputs_of(recipe.parent), "layout": dict(layout), "options": repr(options)}
    take_turns()  # not in its steps: its ranks are threads of this process
    try:
        ranks = run_job(recipe, torchmix.Topology(**layout), program=program, **options)
    except torchmix.TorchmixError as error:
        return {**about, "refused": type(error).__name__}, None
    facts = facts_of_state(ranks[0].state["torchmix_state"])
    ends = {rank.result["end"] for rank in ranks}  # of a rank that fails, the others hear sooner or later
    return {
        **about,
        "order": ranks[0].digests,
        "plan": ranks[0].result["plan"],
        "end": sorted(ends - {"RankLost"} or ends),
        "tensors": {f"rank {number}": rank.result["tensors"] for number, rank in enumerate(ranks)},
        "decisions": [facts["decisions"], facts["shares"]],
        "state": digest(facts["bytes"]),
    }, ranks[0].state


LOSSES = ("web", "prose", "tiny")


def _load(loader: torchmix.StatefulDataLoader, state: dict[str, Any]) -> None:
    """Load a state; an edit is accepted."""
    try:
        loader.load_state_dict(state)
    except torchmix.StateMismatch as error:
        code = ACCEPTED.search(str(error))
        if code is None:
            raise
        loader.load_state_dict(state, accept_edit=code[1])


def plans_of(recipe: Path, dp: int, **options: Any) -> list[list[str]]:
    """Order and plan of six steps, without data; the last line is the error that ended them, if one did."""
    found = []
    try:
        for plan in torchmix.plan(recipe, steps=6, dp=dp, **options):
            take_turns()
            found.append([plan.order_digest.hex(), plan.plan_digest.hex()])
    except torchmix.TorchmixError as error:
        found.append([type(error).__name__])
    return found


def dump(seed: int, number: int) -> dict[str, Any]:
    """All of recipe `number` of a seed."""
    draw = random.Random(f"dump {seed}/{number}")
    if "turns" in WAYS:
        WAYS["turns"] = random.Random(f"turns {seed}/{number}")
    shape = "runs" if number % 11 == 10 else SHAPES[number % len(SHAPES)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if shape == "life":
            return {"shape": shape, **dump_life(draw, folder)}
        if shape == "policy":
            return {"shape": shape, **dump_policy(draw, folder)}
        write = {"mixture": write_mixture, "formats": write_formats, "images": write_images, "runs": write_runs}[shape]
        recipe = write(draw, folder)
        try:
            torchmix.index(recipe)
        except torchmix.TorchmixError as error:
            return {"shape": shape, "inputs": inputs_of(folder), "refused": type(error).__name__}
        return {"shape": shape, **dump_legs(draw, recipe)}


def write_runs(draw: random.Random, folder: Path) -> Path:
    """A recipe of all formats whose documents have runs of ranks; one that has images or maps with lists is refused."""
    path = write_formats(draw, folder)
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    for source in recipe["sources"].values():
        source.pop("reset_id", None)
    recipe.pop("modules", None)
    context = {"rank_tokens": 2 * recipe["batch"]["length"], "per_exchanged": draw.choice([0, 1, 50])}
    context |= draw.choice([{}, {"sizes": [1, 2]}, {"align": 2}])
    recipe["packing"] = {"method": "whole", "overflow": draw.choice(["split", "truncate", "drop"])}
    recipe["balance"] = {"context": context, "cost": {"per_token": 50, "per_pair": draw.randint(0, 2)}}
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def dump_legs(draw: random.Random, recipe: Path) -> dict[str, Any]:
    """Two layouts one after the other, a stop inside a step, another part, and one pass."""
    text = recipe.read_text()
    without: set[str] = {"pp"} if "scope: microbatch" in text else set()  # stages do not wait for each other's items
    without |= {"cp"} if "reset_id" in text else set()  # slices of a document that ends inside are not planned
    layouts = [layout for layout in LAYOUTS if not without & {*layout}]
    first, second = draw.sample(layouts, 2)
    steps = draw.randint(1, 3)
    found: dict[str, Any] = {"plans": plans_of(recipe, first.get("dp", 1))}
    found["first"], state = run_leg(recipe, first, steps=steps)
    if state is not None:
        found["second"], state = run_leg(recipe, second, state=state, steps=2, inside=True)
    if state is not None:
        found["inside"], state = run_leg(recipe, second, state=state, steps=1)
    far = draw.randint(4, 30)
    found["far"], _ = run_leg(recipe, draw.choice(LAYOUTS[:3]), steps=1, start_step=far, look_ahead=1)
    found["one pass"], _ = run_leg(recipe, {}, steps=2, one_pass=True)
    if "\nsplit:" in text:
        found["validation"], _ = run_leg(recipe, second, steps=2, part="validation", one_pass=draw.random() < 0.5)
    return found


def dump_life(draw: random.Random, folder: Path) -> dict[str, Any]:
    """A run whose recipe is edited between its legs."""
    world = make_world(draw, folder)
    world.extra["balance"] = random_balance(draw)
    if draw.random() < 0.3:
        world.extra["packing"]["boundaries"] = "none"
    for stage in world.stages:
        stage["samples"] *= 2
    recipe = world.write()
    found: dict[str, Any] = {"plans": plans_of(recipe, _layout(draw, world).get("dp", 1))}
    state: dict[str, Any] | None = None
    past: list[dict[str, Any]] = []
    kind = ""
    for number in range(4):
        if state is not None:
            kind = _edit(draw, world, state, past)
            recipe = world.write()
        what = f"leg {number} {kind}".strip()
        found[what], state = run_leg(recipe, _layout(draw, world), state=state, steps=draw.choice([1, 2, 3, 9]))
        if world.held or world.split or VALIDATION in world.rows:
            options = {"part": "validation", "one_pass": draw.random() < 0.5}
            found[f"{what} validation"], _ = run_leg(recipe, {}, steps=1, **options)
        if state is None or not found[what]["order"]:
            break
    return found


def _edit(draw: random.Random, world: World, state: dict[str, Any], past: list[dict[str, Any]]) -> str:
    """Edit a world in one way that is possible; its kind."""
    for _ in range(20):
        values, kind = world.recipe_values, draw.choice(EDITS)
        if world.edit(kind, state_of(state["torchmix_state"]), past):
            past.append(values)
            return kind
        world.take_back(values)
    return ""


def _layout(draw: random.Random, world: World) -> dict[str, int]:
    """One whose replicas share the samples of each step, and whose slices are of whole pieces."""
    without: set[str] = set() if all(stage["samples"] % 2 == 0 for stage in world.stages) else {"dp"}
    without |= {"cp"} if world.extra["packing"]["align_tokens"] == 1 else set()
    return draw.choice([layout for layout in LAYOUTS if not without & {*layout}])


def dump_policy(draw: random.Random, folder: Path) -> dict[str, Any]:
    """A run whose shares a policy decides."""
    policy, every, lag = draw.choice(["odm", "exp3", "ado"]), draw.randint(2, 4), draw.randint(1, 3)
    keys = f'policy: {policy}, every: {every} steps, lag: {lag} steps, within: ["0.2x", "5x"]'
    keys += ", options: {ignore_steps: 1, start_step: 4}" if policy == "ado" else ""
    recipe = write_job(folder, extra=f"dynamic: {{{keys}}}")
    found: dict[str, Any] = {}
    found["first"], state = run_leg(recipe, draw.choice(LAYOUTS), steps=8, losses=True)
    if state is not None:
        found["second"], _ = run_leg(recipe, draw.choice(LAYOUTS), state=state, steps=6, losses=True)
    logs = [path.read_text().splitlines() for path in (folder / "decisions").glob("*.jsonl")]
    found["log"] = sorted(line for _, *lines in logs for line in lines)  # the first line names a random branch
    return found


def differences(one: Any, other: Any, but: set[str], path: str = "") -> Iterator[str]:
    """Each value that differs, with where it is."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            if key not in but:
                yield from differences(one.get(key), other.get(key), but, f"{path}: {key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, but, f"{path}: {number}")
    elif one != other:
        yield f"{path}: {_short(one)}, before {_short(other)}"


def _short(value: Any) -> str:
    said = json.dumps(value)
    return said if len(said) < 100 else f"{said[:100]}..."


def main() -> int:
    """Dump the recipes that the folder lacks, and compare; 1 if a value differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--same-as", type=Path, help="the folder of another commit, or one of its files")
    parser.add_argument("--but", action="append", default=[], help="what is not compared, as `state`")
    parser.add_argument("--native", choices=["0", "1", "turns"], help="how the native library is used")
    options = parser.parse_args()
    if options.native == "turns":
        WAYS["turns"] = random.Random(0)
    elif options.native is not None:
        use_native(options.native == "1")
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    compared, differing = 0, []
    for number in range(options.count):
        name = f"{options.seed}-{number}.json"
        path = options.out / name
        if not path.exists():
            path.write_text(json.dumps(dump(options.seed, number), indent=0))
        if options.same_as is None:
            continue
        other = options.same_as / name if options.same_as.is_dir() else options.same_as
        if other.name != name:
            continue
        pair = (json.loads(path.read_text()), json.loads(other.read_text()) if other.exists() else None)
        compared += 1
        first = next(differences(*pair, {*options.but}, name), None)
        differing += [] if first is None else [first]
    if options.same_as is None:
        return 0
    print(json.dumps({"compared": compared, "differing": differing}, indent=1))
    return int(bool(differing) or not compared)


if __name__ == "__main__":
    sys.exit(main())
