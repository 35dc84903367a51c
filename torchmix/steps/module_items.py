"""The items of a step's modules: read, decoded and cut into units, for the ranks of one replica."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchmix.array_types import Int64Array
from torchmix.catalog.manifest import MOST_ID
from torchmix.constructor.build import BlockPieces
from torchmix.constructor.modules import (
    CP_RANK,
    PLACES,
    arrays_of_module,
    item_places,
    items_of_leader,
    items_of_replica,
    route_table,
    slice_align,
)
from torchmix.modalities.modality import Modality, PlannedItem
from torchmix.modalities.table import AUGMENT, kind_named, open_modality
from torchmix.parallel.place_tree import RankPlaces
from torchmix.planner.plan import ItemPlan, StepPlan
from torchmix.reader.items import decode_threads, with_key
from torchmix.reader.protocol import StepItems, StepReader, Tokens
from torchmix.recipe.items import items_of
from torchmix.recipe.modules import DOCUMENT
from torchmix.recipe.parts import Part
from torchmix.recipe.ramp import length_of_step
from torchmix.recipe.sources import masked_sources
from torchmix.steps.state import LoaderState

# --- Bytes of items that a rank got -> units, in the process of the rank.
#
# The same bits, in the same order. A bad item is an error of this rank, or stood in for where its source masks
# bad rows.
#
#     MODULE.file/content     uint8             files of the rank's items, end to end
#     MODULE.item/file_bytes  int64 [n]         bytes of each
#     MODULE.item/planned     int64 [n, m + 2]  what each measures, its number among the items of its row, its epoch
#     MODULE.item/path        uint8 [n, w]      for messages, the file that its row lies in: UTF-8, with zeros behind it

CONTENT, FILE_BYTES, PLANNED, PATH = "file/content", "item/file_bytes", "item/planned", "item/path"


class RankDecoder:
    """Decodes for one rank."""

    def __init__(self, part: Part, directory: Path) -> None:
        """Nothing is imported before the first item comes; `directory` is the recipe's folder."""
        self._part, self._directory = part, directory
        self._masked = masked_sources(part.sources)
        self._names = sorted(part.sources)
        self._modalities: dict[tuple[str, str], Modality] = {}
        """By source and kind."""
        self.items_decoded = 0

    def decoded(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The arrays of a rank's modules, with their units in the place of files.

        Raises:
            CorruptPage: An item cannot be read as it was indexed.
        """
        found = dict(arrays)
        for name in [name for name in arrays if name.endswith(f".{CONTENT}")]:
            module = name.removesuffix(CONTENT)
            content, file_bytes, planned, path = (
                found.pop(module + key) for key in (CONTENT, FILE_BYTES, PLANNED, PATH)
            )
            source, row = found[f"{module}item/source"], found[f"{module}item/row"]
            kind = self._part.modules[module.removesuffix(".")].items
            unit_array = self._any_modality(kind).unit_array
            found[f"{module}unit/{unit_array}"] = self._units(kind, content, file_bytes, planned, path, source, row)
        return found

    def _units(
        self,
        kind: str,
        content: NDArray[Any],
        file_bytes: NDArray[Any],
        planned: NDArray[Any],
        path: NDArray[Any],
        source: NDArray[Any],
        row: NDArray[Any],
    ) -> NDArray[Any]:
        stops = np.cumsum(file_bytes, dtype=np.int64).tolist()
        held = np.ascontiguousarray(content).data
        modalities = {self._names[s]: self._modality(self._names[s], kind) for s in set(source.tolist())}
        asked: list[tuple[PlannedItem, memoryview]] = []
        for s, r, (*measures, number, epoch), file, stop, count in zip(
            source.tolist(), row.tolist(), planned.tolist(), path, stops, file_bytes.tolist(), strict=True
        ):
            item = PlannedItem(
                source=self._names[s],
                row=r,
                number=number,
                measures=tuple(measures),
                file=file.tobytes().rstrip(b"\0").decode(),
            )
            if modalities[item.source].augment is not None:
                item = with_key(item, kind, self._part.seed, epoch)
            asked.append((item, held[stop - count : stop]))
        self.items_decoded += len(asked)

        def make(item: PlannedItem, content: memoryview) -> NDArray[Any]:
            return modalities[item.source].units_of(item, content, is_masked=item.source in self._masked)

        with ThreadPoolExecutor(decode_threads(), "torchmix-items") as pool:
            return _end_to_end(
                self._any_modality(kind), list(pool.map(make, *zip(*asked, strict=True)) if asked else ())
            )

    def _modality(self, name: str, kind: str) -> Modality:
        if (name, kind) not in self._modalities:
            words = items_of(self._part.sources[name])[kind]
            self._modalities[name, kind] = open_modality(name, words, self._directory)
        return self._modalities[name, kind]

    def _any_modality(self, kind: str) -> Modality:
        """That of some source, which have units of one size."""
        return next(self._modality(name, kind) for name in self._names if kind in items_of(self._part.sources[name]))


def _end_to_end(modality: Modality, units: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Units of items as one array, [units, unit_values]."""
    return np.concatenate([np.zeros((0, modality.unit_values), modality.unit_type), *units])


# --- The items of a module: read, decoded and cut into units, for the ranks of one replica.
#
# An item is read and decoded once in a step over the whole job, for the replica whose ranks encode it: by loaders,
# here, or by the rank that gets its file. A bad item stops the run; where its source masks bad rows another stands in
# for it, with a log message.

logger = logging.getLogger(__name__)


def values_of_items(
    plan: StepPlan,
    module: ItemPlan,
    chosen: Int64Array,
    items: StepItems,
    *,
    masked: Collection[str],
    at_rank: bool,
) -> dict[str, NDArray[Any]]:
    """The arrays of some items, by name.

    Args:
        plan: The step.
        module: The module.
        chosen: [n] items of it.
        items: Reads items of the sources.
        masked: Names of sources whose bad items are stood in for.
        at_rank: Files are given as they are, for the rank to decode.

    Returns:
        units, segments: int32 [n] of each, such as patches and tiles; item/NAME: int32 [n, k], see
        `Modality.item_arrays`; unit/NAME: [units, values], or with `at_rank` the arrays of `RankDecoder`.

    Raises:
        CorruptPage: An item cannot be read as it was indexed.
        SourceChanged, SourceUnreadable: A file is not the indexed one, or cannot be read.
    """
    kind = module.unit
    piece, item = module.items.piece[chosen], module.items.item[chosen]
    source, epoch = plan.pieces.source[piece], plan.pieces.epoch[piece]
    some = items.any_modality(kind)
    arrays = {"units": np.zeros(len(chosen), np.int32), "segments": np.ones(len(chosen), np.int32)}
    arrays |= {f"item/{name}": np.zeros((len(chosen), len(of)), np.int32) for name, of in some.item_arrays.items()}
    planned = np.zeros((len(chosen), len(some.measured) + 2), np.int64)
    path = [b""] * len(chosen)
    held: list[Any] = [None] * len(chosen)
    """By item, its file, or its units."""
    with ThreadPoolExecutor(decode_threads(), "torchmix-items") as pool:
        for number in sorted(set(source.tolist())):
            name = plan.sources[number]
            mine = np.flatnonzero(source == number)
            table, modality = items.table(name, kind), items.modality(name, kind)
            arrays["units"][mine] = table.sizes[modality.units][item[mine]]
            if modality.segments is not None:
                arrays["segments"][mine] = table.sizes[modality.segments][item[mine]]
            for array, columns in modality.item_arrays.items():
                for column, key in enumerate(columns):
                    arrays[f"item/{array}"][mine, column] = table.sizes[key][item[mine]]
            found: Iterable[Any]
            if items.gives_units(kind):
                found = items.read_units(name, kind, item[mine], epoch[mine])
            else:
                found = contents = items.read(name, kind, item[mine])
                of_items = items.planned(name, kind, item[mine], epoch[mine])
                planned[mine, :-1] = [(*one.measures, one.number) for one in of_items]
                planned[mine, -1] = epoch[mine]
                for at, one in zip(mine.tolist(), of_items, strict=True):
                    path[at] = one.file.encode()
                if not at_rank:
                    found = pool.map(partial(modality.units_of, is_masked=name in masked), of_items, contents)
            for at, one in zip(mine.tolist(), found, strict=True):
                held[at] = one
    if at_rank and not items.gives_units(kind):
        content = np.frombuffer(bytearray(b"".join(held)), np.uint8)
        file_bytes = np.array(list(map(len, held)), np.int64)
        paths = np.array(path, np.bytes_).view(np.uint8).reshape(len(chosen), -1 if path else 1)
        return arrays | {CONTENT: content, FILE_BYTES: file_bytes, PLANNED: planned, PATH: paths}
    values = _end_to_end(some, held)
    assert int(arrays["units"].sum()) == len(values), "an item has the units that were planned"
    return arrays | {f"unit/{some.unit_array}": values}


def tell_other_decoder(start: LoaderState, decoder: str, kinds: Collection[str]) -> None:
    """Warn where a run had something else than `decoder` of its items before `start`; what is the same is not told."""
    if not decoder or not start.decoder or start.decoder == decoder:
        return
    before, here = ({one.split(" ")[0]: one for one in text.split(";")} for text in (start.decoder, decoder))
    names = {*before, *here}
    if start.edited_from:  # kinds may have come and gone, and sources with functions of their own
        names = (before.keys() & here.keys()) - {AUGMENT.strip()}
    was, now = (
        [some[name] for name in sorted(names & some.keys()) if before.get(name) != here.get(name)]
        for some in (before, here)
    )
    if not was and not now:
        return
    are_builds = any(not one.startswith(AUGMENT) for one in (*was, *now))
    differ = [kind_named(kind).builds_differ for kind in kinds] if are_builds else ["what it draws differs"]
    logger.warning(
        "the state is of a run that decoded %s with %s, and here it is %s: %s, so the run resumes with the same items "
        "and not with the same bits; %s, for both",
        " and ".join(f"{kind}s" for kind in kinds),
        "; ".join(was) or "no augment",
        "; ".join(now) or "no augment",
        ", ".join(differ),
        "install that build, or put back the function of augment" if are_builds else "put back the function of augment",
    )


# --- The arrays of a step's modules, for the ranks of one replica.
#
# What a consumer gets is what the plan says, in any process.


def arrays_of_modules(
    plan: StepPlan,
    *,
    part: Part,
    places: RankPlaces,
    replica: int,
    leader: int | None,
    documents: Mapping[str, Tokens],
    reader: StepReader,
    kinds: Collection[str],
    at_rank: Collection[str],
) -> dict[str, NDArray[Any]]:
    """What the ranks of a replica get of all modules.

    Args:
        plan: The step.
        part: The part of the recipe.
        places: Where ranks stand.
        replica: The replica.
        leader: Whose ranks they are for: no items of others are read. None: for all.
        documents: By module, the tokens of `pieces_of_documents`.
        reader: The reader of the part's sources.
        kinds: The kinds of items that rows of the part's sources have.
        at_rank: Modules whose items the ranks decode.
    """
    arrays: dict[str, NDArray[Any]] = {}
    length = length_of_step(part.batch, plan.step)
    for name, module in plan.item_modules.items():
        align_tokens = slice_align(part.packing)
        routes = route_table(plan, module, places, replica, length=length, align_tokens=align_tokens)
        mine = items_of_replica(module, plan.layout, replica)
        if module.unit == DOCUMENT:
            values = _documents(plan, module, replica, documents[name])
        elif module.unit not in kinds or reader.items is None:  # no source of this part has such items
            mine, none = mine[:0], np.zeros(0, np.int32)
            values = {"units": none, "segments": none, **kind_named(module.unit).arrays_of_nothing()}
        else:
            mine = items_of_leader(module, plan.layout, places, replica, leader)
            values = values_of_items(
                plan, module, mine, reader.items, masked=masked_sources(part.sources), at_rank=name in at_rank
            )
        of_module = arrays_of_module(plan, module, routes, places, replica, mine=mine, values=values)
        if module.unit in kinds and reader.items is not None:
            of_module[PLACES] = item_places(plan, module, replica, reader.items, length=length)
            of_module[CP_RANK] = places.cp_rank_of_replica
        arrays |= {f"{name}.{key}": array for key, array in of_module.items()}
    return arrays


def pieces_of_documents(plan: StepPlan, replica: int, *, length: int) -> dict[str, BlockPieces]:
    """By module, the pieces that are its items and that consumers of a replica compute, to be read end to end.

    Args:
        plan: The step.
        replica: The replica.
        length: Tokens of a sample.
    """
    found = {}
    for name, module in plan.item_modules.items():
        if module.unit != DOCUMENT:
            continue
        piece = module.items.piece[items_of_replica(module, plan.layout, replica)]
        tokens = plan.pieces.tokens[piece]
        found[name] = BlockPieces(
            steps=(plan.step,),
            num_tokens_global=(0,),
            num_samples=-(-int(tokens.sum()) // length),
            micro_batch_size=1,
            sample=np.zeros(len(piece), np.int64),
            sample_offset=np.cumsum(tokens) - tokens,
            source=plan.pieces.source[piece].astype(np.int32),
            row=plan.pieces.row[piece],
            start=plan.pieces.start[piece],
            tokens=tokens,
            ends_document=np.zeros(len(piece), np.bool_),
            epoch=plan.pieces.epoch[piece],
            source_names=plan.sources,
        )
    return found


def _documents(plan: StepPlan, module: ItemPlan, replica: int, read: Tokens) -> dict[str, NDArray[Any]]:
    """Tokens of the pieces that are a module's items, end to end, and where each begins in its document."""
    piece = module.items.piece[items_of_replica(module, plan.layout, replica)]
    tokens = plan.pieces.tokens[piece]
    values = read.values[: int(tokens.sum())]
    # A piece that cannot be read has no ids; the backbone masks it, or stops.
    ids = np.where((values >= 0) & (values <= MOST_ID), values, 0)
    return {
        "units": tokens.astype(np.int32),
        "segments": np.ones(len(tokens), np.int32),
        "item/start": plan.pieces.start[piece],
        "unit/tokens": ids.astype(np.int32),
    }
