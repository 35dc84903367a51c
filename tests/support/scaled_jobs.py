"""A job whose load rises and falls: a source behind a slow map, a schedule, and a profile that says what it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.support.files import make_text_file, make_tokens_file, random_texts, random_tokens
from torchmix.catalog.store import open_part
from torchmix.indexing.scan import index_recipe
from torchmix.recipe.load import load_recipe
from torchmix.recipe.parts import part_of
from torchmix.service.scale.loads import ComingLoads, SourceProfile, profile_of, read_profile, write_profile
from torchmix.service.scale.partition import SourceLoad
from torchmix.service.scale.rule import RunNote
from torchmix.service.scale.scaling import SCALING_NAME

MAP = """\
import time

def remote(columns, *, row, epoch, seed):
    time.sleep({sleep_s} * len(row))
    return {{"text": columns["text"]}}

remote.version = 1
"""
RECIPE = """\
version: 1
seed: 5
batch: {{samples: {samples}, length: 64}}
sources:
  slow: {{path: slow.parquet, text: text, tokenizer: bytes, map: "{module}:remote"}}
  web: {{path: web.parquet, tokens: input_ids}}
mixture: {{slow: {slow}, web: {web}}}
schedule:
  - {{from: {rise[0]} steps, to: {rise[1]} steps, mixture: {{slow: 40%, web: 60%}}}}
  - {{from: {rise[2]} steps, mixture: {{slow: {slow}, web: {web}}}}}
loaders: {{where: remote, endpoints: register, cpu: 8, memory: 8GiB, autoscale: {{min: {least}, max: {most}}}}}
"""


def price(ns_of_token: int) -> SourceProfile:
    """A source that costs so much a token."""
    return SourceProfile(
        tokens=1000,
        busy_ns=1000 * ns_of_token,
        cpu_ns=0,
        read_bytes=0,
        decoded_bytes=0,
        sent_bytes=0,
        window_bytes=1 << 20,
        state_bytes=1 << 10,
        pages=4,
    )


def write_scaled_job(
    folder: Path,
    *,
    least: int,
    most: int,
    sleep_s: float = 0.002,
    samples: int = 4,
    module: str = "remote_map",
    web_ns: int = 4000,
    rows: int = 1500,
    share: str = "4%",
    rise: tuple[int, int, int] = (30, 80, 100),
) -> Path:
    """Files, recipe, catalog and profile; the recipe's path. The source that costs most has a share that rises from
    `share` to 40 % between the first two steps of `rise`, and falls back at the third."""
    folder.mkdir(parents=True, exist_ok=True)
    make_text_file(folder / "slow.parquet", random_texts(1, rows, mean_words=4.0))
    make_tokens_file(folder / "web.parquet", random_tokens(2, rows, mean_tokens=60))
    (folder / f"{module}.py").write_text(MAP.format(sleep_s=0))
    path = folder / "recipe.yaml"
    web = f"{100 - float(share.rstrip('%')):g}%"
    path.write_text(
        RECIPE.format(least=least, most=most, samples=samples, module=module, slow=share, web=web, rise=rise)
    )
    index_recipe(load_recipe(path), folder)
    (folder / f"{module}.py").write_text(MAP.format(sleep_s=sleep_s))  # the index need not wait
    catalog = open_part(folder / "catalog", part_of(load_recipe(path), "train"))
    write_profile(folder / "catalog", profile_of(catalog, 5, {"slow": price(100_000), "web": price(web_ns)}))
    return path


def loads_of_job(path: Path) -> Callable[[int, int, RunNote], Sequence[SourceLoad]]:
    """What steps of a recipe cost, as the rule takes it."""
    part = part_of(load_recipe(path), "train")
    folder = path.parent / "catalog"
    catalog = open_part(folder, part)
    coming = ComingLoads(part, catalog, read_profile(folder, catalog, part.seed))
    return lambda start, stop, note: coming.mean(start, stop, note.gone, note.decided)


def decisions_of_log(folder: Path) -> list[dict[str, Any]]:
    """The decisions that were taken, as the file has them."""
    return [msgspec.json.decode(line) for line in (folder / SCALING_NAME).read_bytes().splitlines()]
