"""What the values of a recipe must mean."""

from __future__ import annotations

import math
from collections.abc import Collection

from torchmix.errors import RecipeError
from torchmix.recipe.amounts import parse_bytes, parse_fraction
from torchmix.recipe.build import nearest
from torchmix.recipe.changes import dynamic_of, parse_shares
from torchmix.recipe.items import check_items, check_packing_of_items, has_items
from torchmix.recipe.modules import check_balance, check_broadcast, check_context, check_modules
from torchmix.recipe.parts import check_hold_out, with_all_sources
from torchmix.recipe.ramp import length_of, stages_of
from torchmix.recipe.sources import (
    FORMATS,
    PARTS,
    check_layout,
    check_map,
    check_properties,
    converted_csv,
    flows,
    format_of,
    masks_bad_rows,
    masks_resets,
    overflow_of,
    paths_of,
    resets_attention,
    resets_positions,
    sources_with_resets,
    tokenizer_kind,
)
from torchmix.recipe.streams import streams_of
from torchmix.recipe.structs import (
    MAX_BATCH_TOKENS,
    MAX_NAME_BYTES,
    Batch,
    Fim,
    Packing,
    Recipe,
    Selection,
    Shuffle,
    Source,
)

# --- What the values of one source, or of a selection of its rows, must mean.
#
# Cost: microseconds a source.

COLUMN_KEYS = ("text", "tokens", "messages", "interleaved")
TOKENIZERS = "bytes, tiktoken:NAME, or the path of a tokenizer.json"


def check_range(value: int, where: str, lowest: int, highest: int | None = None) -> None:
    if value < lowest or (highest is not None and value > highest):
        bounds = f"at least {lowest}" if highest is None else f"in [{lowest}, {highest}]"
        raise RecipeError(f"{value} is out of range; it must be {bounds}", where)


def check_source(name: str, source: Source, where: str) -> None:
    """Check one source, which stands at `where`; raises a RecipeError at the first fault."""
    _check_name(name, where)
    paths = paths_of(source)
    if not paths or not all(paths) or any("\0" in path for path in paths):
        raise RecipeError("is empty; name a file or a glob", f"{where}.path")
    if source.format is not None and source.format not in FORMATS:
        message = f"{source.format!r} is not one of {', '.join(FORMATS)}{nearest(source.format, FORMATS)}"
        if source.format.lower() in ("csv", "tsv"):
            message = f"CSV is not read; DuckDB makes Parquet of it: {converted_csv(paths[0])}"
        raise RecipeError(message, f"{where}.format")
    format = FORMATS[format_of(source)]
    if not format.has_columns:
        for key in (*COLUMN_KEYS, "loss_mask", "tokenizer", "begin_id", "end_id", "map", "keep"):
            if getattr(source, key) is not None:
                message = f"{format.title} files hold tokens and have no columns; remove the key"
                raise RecipeError(message, f"{where}.{key}")
    else:
        _check_column(source, where)
        _check_tokenizer(source, where)
        check_map(source, where)
    if source.fim is not None:
        _check_fim(source, source.fim, f"{where}.fim")
    if source.reset_id is not None:
        check_range(source.reset_id, f"{where}.reset_id", 0, 2**31 - 1)
    if source.documents is not None:
        start, stop = (parse_fraction(text, f"{where}.documents[{i}]") for i, text in enumerate(source.documents))
        if not 0 <= start < stop <= 1:
            message = (
                f"{' to '.join(source.documents)} is no part of the rows; as [0%, 96.9%], the first below the second"
            )
            raise RecipeError(message, f"{where}.documents")
    if source.max_epochs is not None:
        check_range(source.max_epochs, f"{where}.max_epochs", 1)
    _check_bad_rows(source, where)
    check_layout(source, where)
    check_items(source, where)
    check_properties(source, where)


def check_selection(name: str, selection: Selection, sources: Collection[str], where: str) -> None:
    """Check one selection of rows of one of `sources`; raises a RecipeError at the first fault."""
    _check_name(name, where)
    if name in sources:
        raise RecipeError("the name is that of a source", where)
    if selection.source not in sources:
        hint = nearest(selection.source, sources)
        raise RecipeError(f"there is no source {selection.source!r} with files{hint}", f"{where}.from")
    if not selection.where.strip():
        raise RecipeError("is empty; write an SQL expression, as \"lang = 'de'\"", f"{where}.where")
    if selection.max_epochs is not None:
        check_range(selection.max_epochs, f"{where}.max_epochs", 1)


def _check_name(name: str, where: str) -> None:
    if not name.strip() or name != name.strip() or not name.isprintable() or "/" in name or "." in name:
        message = f"the name {name!r} is not usable: printable text without '/', '.' or outer spaces"
        raise RecipeError(message, where)
    if len(name.encode()) > MAX_NAME_BYTES:
        raise RecipeError(f"the name has {len(name.encode())} bytes, at most {MAX_NAME_BYTES}", where)


def _check_bad_rows(source: Source, where: str) -> None:
    if source.max_bad is None:
        return
    if not masks_bad_rows(source):
        message = "bounds what bad_rows: mask leaves out; write bad_rows: mask, or remove it"
        raise RecipeError(message, f"{where}.max_bad")
    if not 0 <= parse_fraction(source.max_bad, f"{where}.max_bad") <= 1:
        raise RecipeError(f"{source.max_bad} is out of range; it must be from 0% to 100%", f"{where}.max_bad")


def _check_column(source: Source, where: str) -> None:
    given = [key for key in COLUMN_KEYS if getattr(source, key) is not None]
    if len(given) != 1:
        found = {0: "neither is given", 2: "both are given"}.get(len(given), f"{', '.join(given)} are given")
        hint = "" if given else " (a prefix of Megatron's .bin and .idx needs format: megatron)"
        words = "text and tokens" if set(given) <= {"text", "tokens"} else ", ".join(COLUMN_KEYS)
        raise RecipeError(f"exactly one of {words} names the column; {found}{hint}", where)
    if not getattr(source, given[0]):
        raise RecipeError("is empty; name a column", f"{where}.{given[0]}")


def _check_tokenizer(source: Source, where: str) -> None:
    if source.tokens is None and source.tokenizer is None and source.map is None:
        raise RecipeError(f"a text column needs a tokenizer; write {TOKENIZERS}", f"{where}.tokenizer")
    for key in ("tokenizer", "begin_id", "end_id"):
        if source.tokens is not None and source.map is None and getattr(source, key) is not None:
            message = f"a column of tokens is used as it is; remove {key}, or name the column by text"
            raise RecipeError(message, f"{where}.{key}")
    kind = "bytes" if source.tokenizer is None else tokenizer_kind(source.tokenizer)
    if kind is None:
        raise RecipeError(f"{source.tokenizer!r} is no tokenizer; write {TOKENIZERS}", f"{where}.tokenizer")
    for key in ("begin_id", "end_id"):
        token = getattr(source, key)
        if token is not None and kind == "bytes":
            message = "bytes has no ids of a vocabulary, and ends each document with 256; remove the key"
            raise RecipeError(message, f"{where}.{key}")
        if isinstance(token, int):
            check_range(token, f"{where}.{key}", 0, 2**31 - 1)
        elif token == "":
            raise RecipeError("is empty; name a token, or give its id", f"{where}.{key}")


def _check_fim(source: Source, fim: Fim, where: str) -> None:
    is_plain = source.messages is None and source.interleaved is None and source.loss_mask is None
    if not is_plain or source.map is not None or has_items(source):
        message = "is of a column of texts alone, or of ids, without a map, a mask or items; remove it"
        raise RecipeError(message, where)
    for key in ("rate", "spm", "fragment_rate"):
        if getattr(fim, key) is not None:
            check_range(getattr(fim, key), f"{where}.{key}", 0, 1)
    if source.text is None:
        _check_fim_of_ids(fim, where)
    for key in ("eod", "split", "fragment_rate"):
        if source.text is not None and getattr(fim, key) is not None:
            raise RecipeError("is of ids, and this source has texts; remove it", f"{where}.{key}")
    if len({*fim.ids}) < 3:
        raise RecipeError(f"{list(fim.ids)} must be three tokens: of prefix, middle and suffix", f"{where}.ids")
    for number, token in enumerate(fim.ids):
        place = f"{where}.ids[{number}]"
        if token == "":
            raise RecipeError("is empty; name a token, or give its id", place)
        if source.tokenizer == "bytes" and not (isinstance(token, int) and token > 256):
            raise RecipeError(f"{token!r} must be an id above 256, since bytes has no tokens beside", place)
        if isinstance(token, int):
            check_range(token, place, 0, 2**31 - 1)


def _check_fim_of_ids(fim: Fim, where: str) -> None:
    if fim.by != "token":
        raise RecipeError(
            "ids are cut between tokens alone; name a column of texts to cut between characters", f"{where}.by"
        )
    if (fim.split is None) != (fim.fragment_rate is None):
        raise RecipeError("split and fragment_rate are given together", where)
    for number, token in enumerate(fim.ids):
        if isinstance(token, str):
            message = f"{token!r} is the name of a token, and ids come without a tokenizer; write its id"
            raise RecipeError(message, f"{where}.ids[{number}]")
    for key in ("eod", "split"):
        token = getattr(fim, key)
        if token is not None:
            check_range(token, f"{where}.{key}", 0, 2**31 - 1)
            if token in fim.ids or (key == "split" and token == fim.eod):
                raise RecipeError(f"{token} stands for something else, too", f"{where}.{key}")


# --- What the values of a whole recipe must mean.
#
# Every fault that can be found without opening data is found here, not in a room below. Cost: microseconds per source.

MOST_IDS = 2**31


def check_values(recipe: Recipe) -> None:
    """Check all values of a recipe that has the right shape.

    Raises:
        RecipeError: The first fault.
    """
    _check_numbers(recipe)
    for name, source in recipe.sources.items():
        check_source(name, source, f"sources.{name}")
        _check_keep(source, recipe.catalog, f"sources.{name}")
    for name, selection in recipe.selections.items():
        check_selection(name, selection, recipe.sources, f"sources.{name}")
    _check_resets(recipe)
    _check_packing_of_sources(recipe)
    parse_shares(recipe)
    if recipe.dynamic is not None:
        dynamic_of(recipe)
    if recipe.split is not None:
        _check_split(recipe)
    _check_parts(recipe)
    _check_packing_of_streams(recipe)
    check_hold_out(recipe)
    check_context(recipe)
    check_broadcast(recipe)
    check_modules(recipe.modules, with_all_sources(recipe).sources)


def _check_numbers(recipe: Recipe) -> None:
    batch, packing, balance, model = recipe.batch, recipe.packing, recipe.balance, recipe.balance.model
    check_range(recipe.seed, "seed", 0, 2**63 - 1)
    _check_batch(batch)
    check_range(packing.align_tokens, "packing.align_tokens", 1)
    if packing.method not in ("concat", "whole") and batch.length % packing.align_tokens:
        default = ", the default," if packing.align_tokens == Packing().align_tokens else ""
        message = f"{packing.align_tokens}{default} does not divide batch.length {batch.length}; choose a divisor of it"
        raise RecipeError(message, "packing.align_tokens")
    if packing.method == "pad" and packing.overflow == "split" and recipe.unit == "documents":
        raise RecipeError(_SPLIT_BY_PAD, "packing.overflow")
    check_balance(balance)
    if model is not None:
        for name in ("layers", "hidden", "ffn", "heads"):
            check_range(getattr(model, name), f"balance.model.{name}", 1)
        if model.vocab is not None:
            check_range(model.vocab, "balance.model.vocab", 0)
        if model.kv_heads is not None:
            check_range(model.kv_heads, "balance.model.kv_heads", 1)
            if model.heads % model.kv_heads:
                raise RecipeError(f"{model.kv_heads} does not divide heads {model.heads}", "balance.model.kv_heads")
    _check_vocabulary(recipe)
    check_shuffle(recipe.shuffle)
    check_catalog_folder(recipe.catalog)
    for number, path in enumerate(recipe.deny):
        if not path or path in recipe.deny[:number]:
            what = "stands there twice" if path else "is empty; name a Parquet file"
            raise RecipeError(f"{path!r} {what}" if path else what, f"deny[{number}]")


def _check_vocabulary(recipe: Recipe) -> None:
    if recipe.vocab_size is None:
        return
    check_range(recipe.vocab_size, "vocab_size", 1, MOST_IDS)
    vocab = None if recipe.balance.model is None else recipe.balance.model.vocab
    if vocab and vocab != recipe.vocab_size:
        message = f"{vocab} ids, and vocab_size is {recipe.vocab_size}; they are of one model: leave this one out"
        raise RecipeError(message, "balance.model.vocab")


def _check_resets(recipe: Recipe) -> None:
    packing = recipe.packing
    does_nothing = not (resets_attention(packing) or resets_positions(packing) or masks_resets(packing))
    for part in PARTS:
        content = recipe if part == "train" else getattr(recipe, part)
        prefix = "" if part == "train" else f"{part}."
        for name, reset_id in sources_with_resets(content.sources).items() if content is not None else ():
            where = f"{prefix}sources.{name}.reset_id"
            if does_nothing:
                message = (
                    "nothing resets at it: packing has boundaries: none, positions of samples and reset_loss: keep; "
                    "remove reset_id, or alter one of these"
                )
                raise RecipeError(message, where)
            if recipe.vocab_size is not None and reset_id >= recipe.vocab_size:
                raise RecipeError(f"{reset_id} is no id of vocab_size {recipe.vocab_size}", where)


_SPLIT_BY_PAD = (
    "split, the default, cuts long documents into pieces, and unit: documents draws them as a whole, while pad gives "
    "each piece a sample; write truncate, drop or error"
)


def _check_packing_of_sources(recipe: Recipe) -> None:
    check_packing_of_items(recipe.packing, any(map(has_items, recipe.sources.values())))
    for part in PARTS:
        content = recipe if part == "train" else getattr(recipe, part)
        for name, source in content.sources.items() if content is not None else ():
            _check_packing_of_source(recipe, source, f"{'' if part == 'train' else f'{part}.'}sources.{name}.packing")


def _check_packing_of_streams(recipe: Recipe) -> None:
    """Check that what is drawn in one order is cut alike."""
    for part in PARTS:
        content, prefix = (recipe, "") if part == "train" else (getattr(recipe, part), f"{part}.")
        for name, stream in streams_of(content).items() if content is not None else ():
            sources = [content.sources[source] for source in stream.sources]
            if len({(overflow_of(source, recipe.packing), source.packing.max_length) for source in sources}) > 1:
                message = (
                    f"documents of {', '.join(stream.sources)} are drawn in one order, that of {name!r}, so what is "
                    f"too long, and what happens to it, is the same for all; give them one overflow and max_length"
                )
                raise RecipeError(message, f"{prefix}sources.{stream.sources[0]}.packing")


def _check_packing_of_source(recipe: Recipe, source: Source, where: str) -> None:
    method, most, length = recipe.packing.method, source.packing.max_length, recipe.batch.length
    is_split = overflow_of(source, recipe.packing) == "split"
    if flows(source):
        if method != "best_fit":
            message = (
                f"concat fills what whole documents leave, and packing.method is {method}; write best_fit there, or "
                f"remove this key"
            )
            raise RecipeError(message, f"{where}.method")
        if has_items(source):
            message = "concat cuts documents anywhere, and items must stay whole; remove this key"
            raise RecipeError(message, f"{where}.method")
    if source.packing.overflow == "split" and method == "pad" and recipe.unit == "documents":
        raise RecipeError(_SPLIT_BY_PAD, f"{where}.overflow")
    if most is None:
        return
    check_range(most, f"{where}.max_length", 1)
    if is_split and (method == "concat" or flows(source)):
        message = "concat cuts documents where samples end, however long they are; remove this key, or write truncate, "
        raise RecipeError(f"{message}drop or error for overflow", f"{where}.max_length")
    unit, key = recipe.packing.align_tokens if method != "whole" else 1, "packing.align_tokens"
    if most > length:  # longer samples cut what was begun before at these
        unit, key = length, "batch.length"
    if is_split and most % unit:
        nearest_two = " or ".join(str(near) for near in (most // unit * unit, (most // unit + 1) * unit) if near)
        message = f"{most} is no multiple of {key} {unit}, at which long documents are cut; write {nearest_two}"
        raise RecipeError(message, f"{where}.max_length")


def _check_batch(batch: Batch) -> None:
    if isinstance(batch.samples, int):
        check_range(batch.samples, "batch.samples", 1)
    else:
        if not batch.samples:
            raise RecipeError("is empty; write a number, or stages as {from_step: 0, samples: 32}", "batch.samples")
        for i, stage in enumerate(batch.samples):
            where = f"batch.samples[{i}]"
            check_range(stage.samples, f"{where}.samples", 1)
            if stage.length is not None:
                _check_length(stage.length, batch, f"{where}.length")
            if i == 0 and stage.from_step != 0:
                raise RecipeError(f"the first stage begins at step {stage.from_step}, not at 0", f"{where}.from_step")
            if i > 0 and stage.from_step <= batch.samples[i - 1].from_step:
                message = (
                    f"{stage.from_step} is not after {batch.samples[i - 1].from_step}, where the stage before begins"
                )
                raise RecipeError(message, f"{where}.from_step")
    check_range(batch.length, "batch.length", 2)
    for stage in stages_of(batch):
        tokens = stage.samples * length_of(batch, stage)
        if tokens > MAX_BATCH_TOKENS:
            message = f"{stage.samples} x {length_of(batch, stage)} = {tokens} tokens, at most {MAX_BATCH_TOKENS}"
            raise RecipeError(message, "batch")


def _check_length(length: int, batch: Batch, where: str) -> None:
    """Check the length that a stage names: documents that were cut before continue where they were."""
    if length < 1 or length % max(1, batch.length):
        message = f"{length} is no multiple of batch.length {batch.length}, the length of the shortest samples"
        raise RecipeError(message, where)


def _check_split(recipe: Recipe) -> None:
    weights = recipe.split or ()
    if not 1 <= len(weights) <= len(PARTS):
        raise RecipeError(f"has {len(weights)} weights; one for each of {', '.join(PARTS)}, 1 to 3 of them", "split")
    for i, weight in enumerate(weights):
        if not 0 <= weight < math.inf:
            raise RecipeError(f"{weight} is no weight; it must be at least 0", f"split[{i}]")
    if weights[0] <= 0:
        raise RecipeError("the weight of train is 0; it must be above 0", "split[0]")
    for part in PARTS[1:]:
        if getattr(recipe, part) is not None:
            raise RecipeError(f"{part} has sources of its own here; remove them, or split", "split")
    for name, source in recipe.sources.items():
        if source.documents is not None:
            message = "split cuts the rows of all sources; remove documents, or split"
            raise RecipeError(message, f"sources.{name}.documents")


def _check_parts(recipe: Recipe) -> None:
    """Check the sources of validation and test. A name has one place in the catalog, so only one part may have it."""
    part_of_name = dict.fromkeys([*recipe.sources, *recipe.selections], "train")
    for part in PARTS[1:]:
        content = getattr(recipe, part)
        if content is None:
            continue
        for name, source in content.sources.items():
            check_source(name, source, f"{part}.sources.{name}")
            _check_keep(source, recipe.catalog, f"{part}.sources.{name}")
        for name, selection in content.selections.items():
            check_selection(name, selection, content.sources, f"{part}.sources.{name}")
        for name in (*content.sources, *content.selections):
            where = f"{part}.sources.{name}"
            if name in part_of_name:
                message = f"the name is that of a source of {part_of_name[name]}; a name stands in one part"
                raise RecipeError(message, where)
            part_of_name[name] = part
        parse_shares(content, part)


def _check_keep(source: Source, catalog: str, where: str) -> None:
    if source.keep is not None and "://" in catalog:
        raise RecipeError(f"ids are kept in a folder, and the catalog is {catalog}; remove the key", f"{where}.keep")


def check_catalog_folder(folder: str) -> str:
    """The folder of a catalog as the user names it, if it can be one; else a RecipeError."""
    if not folder:
        raise RecipeError("is empty; name a folder", "catalog")
    scheme, mark, place = folder.partition("://")
    if mark and scheme.lower() == "file":
        raise RecipeError(f"{folder}: write the path of a folder as it is, without file://", "catalog")
    if mark and scheme.lower() == "hf":
        raise RecipeError(
            f"{folder}: each object of a catalog would be a commit there; name a bucket of s3:// or gs://, or a folder",
            "catalog",
        )
    store, colon, rest = folder.partition(":")
    is_of_buckets = store.lower() in ("s3", "gs")
    if colon and not mark and is_of_buckets:
        message = f"{folder} would be a folder of this machine; write {store}://{rest.lstrip('/')}"
        raise RecipeError(message, "catalog")
    if mark and is_of_buckets and place.startswith("/"):
        raise RecipeError(f"{folder} names no bucket; write {scheme}://BUCKET{place}", "catalog")
    if mark and not place.strip("/").partition("/")[2]:
        message = f"{folder} is a whole bucket; name a folder in it, as {folder.rstrip('/')}/catalog"
        raise RecipeError(message, "catalog")
    return folder


def check_shuffle(shuffle: Shuffle) -> None:
    """Check how far rows travel; raises a RecipeError at the first fault."""
    check_range(shuffle.window_pages, "shuffle.window_pages", 1)
    parse_bytes(shuffle.window_bytes, where="shuffle.window_bytes")
