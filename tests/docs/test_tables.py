"""The tables of docs/formats.md against what the code has: keys, defaults, fields, columns, dtypes."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from tests.support.file_indexes import make_file_index, publish_files
from tests.support.recipes import make_recipe
from torchmix.catalog.manifest import CATALOG_VERSION, FileEntry, Manifest, SourceEntry, ViewEntry
from torchmix.constructor.arrays import SEQUENCE_DTYPES, SEQUENCE_FIELDS, SPAN_FIELDS
from torchmix.constructor.fields import Microbatch
from torchmix.mixture.draw import Position
from torchmix.parallel.wire import DTYPES, ENVELOPE_FIELDS, STAGES, WIRE_VERSION, Envelope
from torchmix.planner.cursor import Cursor, Decided, Decision, Eras, RunRows, StreamBefore
from torchmix.planner.drawing import DrawnTokens
from torchmix.planner.entering import POOL_COLUMNS
from torchmix.planner.plan import ORDER_VERSION
from torchmix.recipe.load import check_recipe, load_recipe
from torchmix.recipe.structs import (
    RECIPE_VERSION,
    Balance,
    Batch,
    Dynamic,
    Evaluation,
    Loaders,
    Model,
    Packing,
    Recipe,
    Shuffle,
    Source,
)
from torchmix.steps.header import StepHeader
from torchmix.steps.replay import SCHEMAS, PlanManifest
from torchmix.steps.state import STATE_VERSION, LoaderState

TEXT = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")


def section(title: str, *, level: int = 2) -> str:
    """A section of the document, up to the next heading of its level."""
    start = TEXT.index(f"\n{'#' * level} {title}\n")
    stop = re.search(rf"\n#{{2,{level}}} ", TEXT[start + 1 :])
    return TEXT[start : start + 1 + stop.start()] if stop else TEXT[start:]


def table(text: str, header: str) -> list[list[str]]:
    """Cells of the table whose header begins so; `\\|` is no border."""
    lines = text[text.index(f"| {header}") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def keys_of(kind: Any, prefix: str = "") -> dict[str, str]:
    """Dotted key -> its default as the table spells it, of a Struct and those below it."""
    keys: dict[str, str] = {}
    for field in msgspec.structs.fields(kind):
        inner = [each for each in (field.type, *get_args(field.type)) if isinstance(each, type)]
        struct = next((each for each in inner if issubclass(each, msgspec.Struct)), None)
        name = prefix + field.encode_name
        if struct is Evaluation:
            keys[name] = "none"  # the keys of a recipe once more
        elif struct is not None:
            if str in inner and not str(field.type).startswith("dict"):  # a word, or a mapping
                keys[name] = "required" if field.required else "none"
            keys |= keys_of(struct, f"{name}.NAME." if str(field.type).startswith("dict") else f"{name}.")
        elif str(field.type).startswith("dict"):
            keys[f"{name}.NAME"] = "required" if field.required else "none"
        elif field.required:
            keys[name] = "required"
        else:
            default = (
                field.default
                if type(field.default) is not tuple or not field.default
                else f"[{', '.join(map(str, field.default))}]"
            )
            keys[name] = "none" if default is None else f"`{default}`"
    return keys


def test_the_recipe_table_has_every_key_with_its_default() -> None:
    found = {names(key)[0]: default for key, _, default, _ in table(section("Recipe"), "key | type")}
    keys = keys_of(Recipe)
    for name in [name for name in keys if name.startswith("selections.")]:  # in a file they stand among the sources
        keys.setdefault(f"sources{name.removeprefix('selections')}", keys.pop(name))
    assert found == keys
    assert {"batch.samples", "sources.NAME.path", "balance.model.vocab", "mixture.NAME"} <= set(found)


def test_the_words_of_the_recipe_table_are_the_valid_ones() -> None:
    documented = {names(row[0])[0]: names(row[1]) for row in table(section("Recipe"), "key | type")}
    valid = {
        f"{prefix}.{field.name}": [word for word in get_args(field.type) if isinstance(word, str)]
        for prefix, kind in (
            ("packing", Packing),
            ("balance", Balance),
            ("sources.NAME", Source),
            ("shuffle", Shuffle),
            ("loaders", Loaders),
            ("dynamic", Dynamic),
        )
        for field in msgspec.structs.fields(kind)
    }
    found = {key: words for key, words in valid.items() if words}
    assert {"packing.method", "packing.overflow", "balance.level", "sources.NAME.on_exhausted"} <= set(found)
    assert {key: documented[key] for key in found} == found


def test_the_recipe_of_the_document_loads(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(re.search(r"```yaml\n(.*?)```", section("Recipe"), re.DOTALL)[1], encoding="utf-8")
    recipe = load_recipe(path)
    assert (recipe.batch, recipe.balance.model) == (
        Batch(samples=64, length=1024),
        Model(layers=32, hidden=4096, ffn=11008, heads=32),
    )
    assert check_recipe(recipe) == recipe


def test_the_versions_of_the_document_are_those_of_the_code() -> None:
    found = {names(tag)[0]: int(version) for tag, version, _, _ in table(TEXT, "tag | version")}
    assert found == {
        "RECIPE": RECIPE_VERSION,
        "CATALOG": CATALOG_VERSION,
        "ORDER": ORDER_VERSION,
        "STATE": STATE_VERSION,
        "WIRE": WIRE_VERSION,
    }


def test_the_catalog_tables_are_what_is_written(tmp_path: Path) -> None:
    manifest = publish_files(
        make_recipe({"web": "100%"}), tmp_path, {"web": [("a.parquet", make_file_index([[3, 4], [5]]))]}
    )
    entry = manifest.sources["web"]
    text = section("Catalog")
    arrays = {names(name)[0]: names(dtype)[0].replace("\\", "") for name, dtype, _ in table(text, "array | dtype")}
    assert arrays == {name: array.dtype for name, array in entry.arrays.items()}
    keys = [name for row in table(text, "key | value") for name in names(row[0])]
    assert sorted(keys) == sorted(SourceEntry.__struct_fields__)
    of_rows = {"properties", "views", "earlier_views", "denied"}
    assert set(Manifest.__struct_fields__) == {"version", "sources", "superseded", *of_rows}
    views = [names(row[0]) for row in table(section("Catalog"), "key of a view | value")]
    assert sorted(name for row in views for name in row) == sorted(ViewEntry.__struct_fields__)
    files = next(row[1] for row in table(text, "key | value") if row[0] == "`files`")
    assert re.findall(r"\w+", names(files)[0]) == list(FileEntry.__struct_fields__)


def test_the_tensors_table_is_a_microbatch() -> None:
    found = [names(field)[0] for field, _, _ in table(section("Tensors"), "field | dtype")]
    held = ("tokens_int32", "labels_int32", "spans")
    assert found[5:] == [name for name in Microbatch.__struct_fields__ if name not in held]
    made = {name for name, value in vars(Microbatch).items() if isinstance(value, cached_property)}
    assert set(found[:5]) == made


def test_the_table_of_held_fields_is_what_a_step_holds() -> None:
    found = {names(field)[0]: dtype for field, dtype, _ in table(section("Held fields", level=3), "array | dtype")}
    assert tuple(found) == SEQUENCE_FIELDS + SPAN_FIELDS
    for name, dtype in SEQUENCE_DTYPES.items():
        assert found[name].startswith(np.dtype(dtype).name)


@pytest.mark.parametrize(
    ("title", "level", "record"),
    [("State", 2, LoaderState), ("Where a run stands", 3, Cursor), ("Rows of a state", 3, RunRows)],
)
def test_the_state_tables_are_its_records(title: str, level: int, record: type[msgspec.Struct]) -> None:
    rows = table(section(title, level=level), "key | type")
    assert [name for row in rows for name in names(row[0])] == list(record.__struct_fields__)


def test_the_state_tables_name_the_columns_and_lists_of_a_cursor() -> None:
    rows = {names(key)[0]: text for key, _, text in table(section("Where a run stands", level=3), "key | type")}
    assert names(rows["position"]) == list(Position.__struct_fields__)
    assert names(rows["pool"])[: len(POOL_COLUMNS)] == list(POOL_COLUMNS)
    for key, record in {"drawn": DrawnTokens, "decisions": Decision, "eras": StreamBefore}.items():
        assert f"`[{', '.join(record.__struct_fields__)}]`" in rows[key]
    assert names(rows["decided"]) == list(Decided.__struct_fields__)
    assert {*Eras.__struct_fields__} <= {*names(rows["eras"])}


def test_the_wire_table_is_an_envelope() -> None:
    text = section("Wire")
    rows = table(text, "place | field")
    assert [int(row[0]) for row in rows] == list(range(ENVELOPE_FIELDS))
    assert [names(row[1])[0] for row in rows[2:-1]] == list(Envelope.__struct_fields__)
    assert names(rows[6][2]) == list(STAGES)
    assert re.findall(r"(\d)\s+(\w+)[,.]", text[text.index("Dtypes:") :].split("Arrays")[0]) == [
        (str(code), dtype) for code, dtype in enumerate(DTYPES)
    ]
    header = text[text.index("The header is a msgpack map") : text.index("Before steps are used")]
    assert [name for name in names(header) if name in StepHeader.__struct_fields__] == list(
        StepHeader.__struct_fields__
    )


@pytest.mark.parametrize(("file", "schema"), SCHEMAS.items())
def test_the_columns_of_plan_files_are_those_of_the_tables(file: str, schema: pa.Schema) -> None:
    text = section("Plan files")
    rows = table(text[text.index(f"`{file}` has") :], "column | type")
    assert [(names(name)[0], kind) for name, kind, _ in rows] == [(field.name, str(field.type)) for field in schema]


def test_the_keys_of_plan_json_are_those_of_the_table() -> None:
    text = section("Plan files")
    rows = table(text[text.index("`plan.json` is") :], "key | type")
    assert [name for key, _, _ in rows for name in names(key)] == list(PlanManifest.__struct_fields__)
