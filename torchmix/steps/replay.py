"""Plans as files: written to be looked at, and replayed on any layout."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace
from numpy.typing import NDArray

from torchmix import __version__
from torchmix.array_types import Int64Array
from torchmix.errors import OptionError, PlanError, PlanFilesError, StateError, StateMismatch, naming
from torchmix.parallel.place_tree import Layout
from torchmix.planner.cursor import Cursor
from torchmix.planner.entering import POOL_COLUMNS, looked_up
from torchmix.planner.graph.dgraph import DrawnStep, TokensOfStep
from torchmix.planner.pack import Packed, Pieces
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import Planner
from torchmix.planner.plans import placed_by_hand
from torchmix.recipe.build import listed
from torchmix.recipe.fingerprint import key_digests, recipe_fingerprint, recipe_keys
from torchmix.recipe.parts import Part
from torchmix.steps.state import LoaderState, check_catalog, decode_state, encode_state, state_of_cursor
from torchmix.storage.random_access import LocalFile, hash_ends

# --- The columns of a plan's files.
#
# `docs/formats.md` has these columns; all rows of a step lie in one row group.

PIECES_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("sample", pa.int64()),
        ("slot", pa.int64()),
        ("sample_offset", pa.int64()),
        ("stream", pa.string()),
        ("source", pa.string()),
        ("row", pa.int64()),
        ("epoch", pa.int64()),
        ("start", pa.int64()),
        ("tokens", pa.int64()),
        ("drawn_step", pa.int64()),
        ("age", pa.int64()),
        ("dp_rank", pa.int64()),
        ("microbatch", pa.int64()),
    ]
)
STEPS_SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("stream", pa.string()),
        ("asked_tokens", pa.int64()),
        ("drawn_tokens", pa.int64()),
        ("delivered_tokens", pa.int64()),
        ("pool_tokens", pa.int64()),
        ("capacity_tokens", pa.int64()),
        ("order_digest", pa.string()),
        ("plan_digest", pa.string()),
        ("lower_bound", pa.int64()),
        ("ratio", pa.float64()),
        ("hash_order_cost", pa.int64()),
    ]
)
STATES_SCHEMA = pa.schema([("step", pa.int64()), ("state", pa.binary())])
PLACES = ("microbatch", "first_rank", "ranks")
PLACES_SCHEMA = pa.schema([(name, pa.int64()) for name in ("step", "sample", *PLACES)])
SCHEMAS = {
    "pieces.parquet": PIECES_SCHEMA,
    "steps.parquet": STEPS_SCHEMA,
    "states.parquet": STATES_SCHEMA,
    "places.parquet": PLACES_SCHEMA,
}
MANIFEST = "plan.json"


def paths_of(folder: Path) -> list[Path]:
    """Where the files of a plan lie in a folder."""
    return [folder / name for name in (*SCHEMAS, MANIFEST)]


def columns_of_pieces(plan: StepPlan) -> Mapping[str, Any]:
    """The rows of a step in `pieces.parquet`."""
    pieces, placement = plan.pieces, plan.placement
    return {
        "step": np.full(len(pieces), plan.step, np.int64),
        "sample": plan.sample,
        "slot": plan.slot,
        "sample_offset": plan.sample_offset,
        "stream": np.array(plan.streams, object)[pieces.stream],
        "source": np.array(plan.sources, object)[pieces.source],
        "row": pieces.row,
        "epoch": pieces.epoch,
        "start": pieces.start,
        "tokens": pieces.tokens,
        "drawn_step": pieces.drawn_step,
        "age": plan.step - pieces.drawn_step,
        "dp_rank": placement.dp_rank_of_sample[plan.sample],
        "microbatch": placement.microbatch_of_sample[plan.sample],
    }


def columns_of_step(plan: StepPlan) -> Mapping[str, Any]:
    """The rows of a step in `steps.parquet`."""
    count = len(plan.streams)
    return {
        "step": np.full(count, plan.step, np.int64),
        "stream": list(plan.streams),
        "asked_tokens": plan.asked_tokens,
        "drawn_tokens": plan.drawn_tokens,
        "delivered_tokens": plan.delivered_tokens,
        "pool_tokens": plan.pool_tokens,
        "capacity_tokens": np.full(count, plan.capacity_tokens, np.int64),
        "order_digest": [plan.order_digest.hex()] * count,
        "plan_digest": [plan.plan_digest.hex()] * count,
        "lower_bound": np.full(count, plan.balance.lower_bound, np.int64),
        "ratio": np.full(count, plan.balance.ratio),
        "hash_order_cost": np.full(count, plan.balance.hash_order_cost, np.int64),
    }


def columns_of_places(plan: StepPlan) -> Mapping[str, Any]:
    """The rows of a step in `places.parquet`."""
    placement, contexts, cp = plan.placement, plan.contexts, plan.layout.cp
    count = len(placement.microbatch_of_sample)
    if contexts is None:
        first_rank, ranks = placement.dp_rank_of_sample * cp, np.full(count, cp, np.int64)
    else:
        run = contexts.bin_of_sample
        first_rank, ranks = contexts.first_rank_of_bin[run], contexts.size_of_bin[run]
    return {
        "step": np.full(count, plan.step, np.int64),
        "sample": np.arange(count),
        "microbatch": placement.microbatch_of_sample,
        "first_rank": first_rank,
        "ranks": ranks,
    }


# --- `plan.json`: what a plan on disk is of.
#
# Whatever decides which pieces are in which step is in it, as a fingerprint; the files are known by their sizes and
# ends, so that a cut or foreign one is noticed before a step is made from it. Cost: two short reads a file.

PLAN_VERSION = 1
_Step = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class FileOfPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the Parquet files."""

    bytes: int
    ends: str
    """Hash of its first and last bytes; pages have checksums of their own."""


class PlanManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan is of."""

    version: int
    torchmix: str
    """The version that planned it."""
    part: str
    one_pass: bool
    recipe_fingerprint: str
    catalog_fingerprint: str
    denied: str
    """Fingerprint of the documents that are not given; empty where there are none."""
    first_step: _Step
    stop_step: _Step
    """The step behind the last one."""
    dp: int
    cp: int
    micro_batch_size: int
    """With `dp` and `cp`: the layout that `dp_rank`, `microbatch` and the places of samples are of."""
    placement: str
    """Hash of whatever else decides where samples are placed; see `placement_key`."""
    order_digest: str
    """The digest of all steps before `stop_step`."""
    files: dict[str, FileOfPlan]


def placement_key(part: Part, layout: Layout) -> str:
    """16 hex digits over the sizes of a job and the recipe's settings of balance and modules."""
    settings = msgspec.json.encode([part.balance, part.modules, part.packing.boundaries], order="sorted")
    sizes = msgspec.json.encode({**asdict(layout), "vocab_size": part.vocab_size}, order="sorted")
    return hashlib.sha256(settings + sizes).hexdigest()[:16]


def file_of_plan(path: Path) -> FileOfPlan:
    """Size and ends of a file."""
    with closing(LocalFile(path)) as file:
        num_bytes, ends = hash_ends(file)
    return FileOfPlan(bytes=num_bytes, ends=ends)


def encode_manifest(manifest: PlanManifest) -> bytes:
    """The bytes of `plan.json`."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


_decode_plan_manifest = msgspec.json.Decoder(PlanManifest).decode


def read_manifest(folder: Path) -> PlanManifest:
    """The manifest of a plan whose files are whole.

    Raises:
        PlanFilesError: There is no plan in the folder; it is of another version; a file is missing, cut or another.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except OSError as error:
        raise PlanFilesError(
            f"{folder} holds no plan: {MANIFEST} cannot be read ({error.strerror or error}); "
            f"`torchmix plan RECIPE --steps N --out {folder}` writes one"
        ) from error
    try:
        version = msgspec.json.decode(text, type=dict[str, object]).get("version")
        if version != PLAN_VERSION:
            raise PlanFilesError(f"{path} has version {version!r}, this torchmix reads version {PLAN_VERSION}")
        manifest = _decode_plan_manifest(text)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise PlanFilesError(f"{path} is damaged: {error}; plan again with --out") from error
    for name in SCHEMAS:
        _check_file(folder / name, manifest.files.get(name))
    return manifest


def _check_file(path: Path, expected: FileOfPlan | None) -> None:
    try:
        found = file_of_plan(path)
    except OSError as error:
        raise PlanFilesError(f"{path} cannot be read: {error.strerror}; plan again with --out") from error
    if found == expected:
        return
    what = "is another file than the one that was written"
    if expected is not None and found.bytes < expected.bytes:
        what = f"is cut: it has {found.bytes} bytes of {expected.bytes}"
    raise PlanFilesError(f"{path} {what}; plan again with --out")


def check_plan_of(manifest: PlanManifest, part: Part, catalog: str, *, folder: Path) -> None:
    """Refuse a plan of another part, recipe or catalog.

    Raises:
        PlanFilesError: Names both values.
    """
    pairs: Mapping[str, tuple[object, object]] = {
        "part": (manifest.part, part.name),
        "one_pass": (manifest.one_pass, part.one_pass),
        "recipe": (manifest.recipe_fingerprint, recipe_fingerprint(part)),
        "catalog": (manifest.catalog_fingerprint, catalog),
    }
    for what, (planned, here) in pairs.items():
        if planned != here:
            raise PlanFilesError(
                f"the plan in {folder} is of {what} {planned}, this loader has {what} {here}; plan again with --out, "
                f"or build the loader as the plan was made"
            )


# --- Plans of steps -> files that can be looked at, and replayed.
#
# The files appear together and whole, or not at all: they are written aside and renamed, the manifest last. Cost:
# memory of one row group, about 100,000 rows; a state takes a kilobyte and some bytes a stream, a small part of the
# pieces of its step.

ROW_GROUP_ROWS = 100_000


class PlanFiles:
    """Writes the Parquet files, a row group at a time; all rows of a step are in one."""

    def __init__(self, writers: Mapping[str, pq.ParquetWriter], planner: Planner, catalog: str) -> None:
        """Begin.

        Args:
            writers: By the name of the file.
            planner: That makes the plans.
            catalog: Fingerprint of its catalog.
        """
        self._writers = writers
        self._waiting: dict[str, list[pa.Table]] = {name: [] for name in writers}
        self._planner, self._catalog = planner, catalog
        self._recipe, self._keys = recipe_fingerprint(planner.part), key_digests(recipe_keys(planner.part))
        self._first: Cursor | None = None
        self._last: Cursor | None = None

    def add(self, plan: StepPlan, before: Cursor, after: Cursor, *, by_hand: bool = False) -> None:
        """Append one step; steps come in ascending order.

        Args:
            plan: The plan of the step.
            before: The cursor that it was planned at.
            after: The cursor behind it.
            by_hand: The plan is of `plan_raw`: its samples stay where they are, and only the layout that they are
                placed on may replay them. Else the recipe places them again, on any layout.

        Raises:
            PlanError: A plan by hand has modules, whose items the recipe alone can place again.
        """
        if by_hand and plan.item_modules:
            raise PlanError(
                f"step {plan.step} has the modules {listed(plan.item_modules)}: items are not among the files, "
                f"so a plan by hand is without modules; write a strategy, which loaders run"
            )
        if self._first is None:
            self._first = before
            self._append_state(before)
        self._append("pieces.parquet", columns_of_pieces(plan))
        self._append("steps.parquet", columns_of_step(plan))
        if by_hand:
            self._append("places.parquet", columns_of_places(plan))
        self._append_state(after)
        self._last = after

    def manifest(self, folder: Path) -> PlanManifest:
        """What was written, of files that are closed.

        Args:
            folder: Where they lie, each under the name that `_aside` gives it.
        """
        planner, first, last = self._planner, self._first or self._planner.start(), self._last or self._planner.start()
        return PlanManifest(
            version=PLAN_VERSION,
            torchmix=__version__,
            part=planner.part.name,
            one_pass=planner.part.one_pass,
            recipe_fingerprint=self._recipe,
            catalog_fingerprint=self._catalog,
            denied=planner.denied_fingerprint,
            first_step=first.step,
            stop_step=last.step,
            dp=planner.layout.dp,
            cp=planner.layout.cp,
            micro_batch_size=planner.layout.micro_batch_size,
            placement=placement_key(planner.part, planner.layout),
            order_digest=last.order_digest.hex(),
            files={name: file_of_plan(_aside(folder / name)) for name in SCHEMAS},
        )

    def flush(self) -> None:
        """Write what waits."""
        for name in self._writers:
            self._write(name)

    def _append_state(self, cursor: Cursor) -> None:
        state = state_of_cursor(cursor, self._planner, recipe=self._recipe, catalog=self._catalog, keys=self._keys)
        self._append("states.parquet", {"step": [cursor.step], "state": [encode_state(state)]})

    def _append(self, name: str, columns: Mapping[str, object]) -> None:
        waiting = self._waiting[name]
        waiting.append(pa.table(columns, schema=SCHEMAS[name]))
        most = ROW_GROUP_ROWS if name != "states.parquet" else ROW_GROUP_ROWS // 100
        if sum(len(each) for each in waiting) >= most:
            self._write(name)

    def _write(self, name: str) -> None:
        if waiting := self._waiting[name]:
            table = pa.concat_tables(waiting)
            self._writers[name].write_table(table, row_group_size=len(table))
            waiting.clear()


def check_plan_folder(folder: Path) -> None:
    """Refuse a folder for a plan that holds anything else: files of data beside a plan's would match one glob.

    Args:
        folder: May be missing; it may hold an earlier plan, or what was left of one that was interrupted.

    Raises:
        OptionError: There is something else in it.
    """
    own = {path.name for name in (*SCHEMAS, MANIFEST) for path in (folder / name, _aside(folder / name))}
    others = sorted({path.name for path in folder.iterdir()} - own) if folder.is_dir() else []
    if others:
        raise OptionError(
            f"the folder {folder} for the plan holds {listed(others, 3)}, which is of no plan; name a new or an empty "
            f"folder"
        )


@contextmanager
def write_plan_files(folder: Path, planner: Planner, catalog: str) -> Iterator[PlanFiles]:
    """Open the files of a plan, and publish them where the block ends well.

    Args:
        folder: Made if missing. Files of an earlier plan in it stay until the new ones are whole; it holds nothing
            else.
        planner: That makes the plans.
        catalog: Fingerprint of its catalog.

    Raises:
        OptionError: The folder holds something else.
    """
    check_plan_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, "is a file; name a folder for the plan", str(folder)) from None
    try:
        with naming(folder), ExitStack() as stack:
            writers = {
                name: stack.enter_context(
                    pq.ParquetWriter(_aside(folder / name), schema, compression="zstd", write_page_checksum=True)
                )
                for name, schema in SCHEMAS.items()
            }
            files = PlanFiles(writers, planner, catalog)
            yield files
            files.flush()
        with naming(folder):
            _aside(folder / MANIFEST).write_bytes(encode_manifest(files.manifest(folder)))
        for name in (*SCHEMAS, MANIFEST):
            _aside(folder / name).replace(folder / name)
    finally:
        for name in (*SCHEMAS, MANIFEST):
            _aside(folder / name).unlink(missing_ok=True)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


# --- Files of a plan -> plans of its steps, placed for any layout.
#
# A replayed step is the one that was planned, bit by bit: its pieces are hashed to the order digest that was written;
# damage is an error before a step is given. Cost: one row group is decoded at a time, and held; placing as in a
# planned run.


class RecordedPlan:
    """The steps of a plan on disk; `step` stands in the place of `Planner.step`."""

    def __init__(self, folder: Path, planner: Planner, catalog: str) -> None:
        """Open the files.

        Args:
            folder: Where they lie.
            planner: The planner of the loader; it places, and continues behind the last step.
            catalog: Fingerprint of its catalog.

        Raises:
            PlanFilesError: There is no plan, it is damaged, or of another part, recipe or catalog.
        """
        self._folder, self._planner, self._catalog = folder, planner, catalog
        self.manifest: PlanManifest = read_manifest(folder)
        check_plan_of(self.manifest, planner.part, catalog, folder=folder)
        if self.manifest.denied != planner.denied_fingerprint:
            raise PlanFilesError(
                f"the plan in {folder} is of other denied documents ({self.manifest.denied or 'none'}) than "
                f"there are now ({planner.denied_fingerprint or 'none'}); plan again with --out"
            )
        self._pieces, self._steps, self._states, self._places = (_RowsOfSteps(folder / name) for name in SCHEMAS)
        layout = planner.layout
        here = (layout.dp, layout.micro_batch_size, placement_key(planner.part, layout))
        there = self.manifest.dp, self.manifest.micro_batch_size, self.manifest.placement
        self._is_same_layout = here == there

    def close(self) -> None:
        """Close the files."""
        for file in (self._pieces, self._steps, self._states, self._places):
            file.close()

    def has(self, step: int) -> bool:
        """Whether a step is on disk."""
        return self.manifest.first_step <= step < self.manifest.stop_step

    def cursor(self, step: int) -> Cursor:
        """The cursor before a step, up to the one behind the last.

        Raises:
            PlanFilesError: The file is damaged.
        """
        columns, rows = self._states.of_step(step)
        if rows.stop - rows.start != 1:
            raise self._damaged(step, f"states.parquet has {rows.stop - rows.start} states")
        try:
            state = decode_state(columns["state"][rows.start], recipe=self._planner.part)
            if state.step != step or state.rows != self._planner.rows:
                raise StateError(f"a state of step {state.step} and streams {list(state.rows.streams)}, or other rows")
            return replace(state.at, pool=looked_up(state.at.pool, self._planner))
        except StateError as error:
            raise self._damaged(step, str(error)) from error

    def cursor_of_state(self, state: LoaderState, *, is_stopped: Callable[[], bool] = lambda: False) -> Cursor | None:
        """The cursor to resume from, without planning steps that are on disk; None if `is_stopped` ended the others.

        Args:
            state: Before a step; one that says where each stream stands lies within the plan.
            is_stopped: Asked before each step behind the plan.

        Raises:
            StateMismatch: The state is of another run than the plan.
            PlanFilesError: The state lies before the first step of the plan.
        """
        about, step = self.manifest, state.step
        if step < about.first_step:
            raise PlanFilesError(
                f"the plan in {self._folder} begins at step {about.first_step}, and the loader is at step {step}; plan "
                f"from --start {step} on, or begin with start_step={about.first_step}"
            )
        check_catalog(state, self._catalog)
        cursor = self.cursor(min(step, about.stop_step))
        if state.is_planned and state.order_digest != cursor.order_digest:
            raise StateMismatch(
                f"the state before step {step} has order digest {state.order_digest.hex()}, the plan in {self._folder} "
                f"{cursor.order_digest.hex()}: they are of different runs; load a state of the planned run, or build "
                f"the loader without replay"
            )
        while cursor.step < step:
            if is_stopped():
                return None
            cursor = self._planner.skip(cursor)
        return cursor

    def step(self, cursor: Cursor) -> tuple[StepPlan, Cursor]:
        """The plan of the step at a cursor, and the next cursor.

        Raises:
            PlanFilesError: What is on disk is not what was planned, or was placed by hand on another layout.
        """
        planner, step = self._planner, cursor.step
        planner.cut_for(step)
        after = self.cursor(step + 1)
        columns, rows = self._pieces.of_step(step)
        of = {name: column[rows] for name, column in columns.items()}
        try:
            of["stream"] = _numbers(of["stream"], planner.streams)
            of["source"] = _numbers(of["source"], planner.sources)
            pieces = looked_up(Pieces(**{name: of[name] for name in POOL_COLUMNS}), planner)
        except (StateError, ValueError) as error:
            raise self._damaged(step, "a piece is of no stream, source or row that there is") from error
        packed = Packed(
            pieces=pieces,
            sample=of["sample"],
            slot=of["slot"],
            sample_offset=of["sample_offset"],
            pool=after.pool,
        )
        digest = planner.order_digest_of(cursor.order_digest, step, packed)
        if digest != after.order_digest:
            raise self._damaged(
                step, f"its pieces have order digest {digest.hex()}, not {after.order_digest.hex()} as planned"
            )
        said = self._sums_of_step(step)
        drawn = planner.drawn_step(cursor, packed, said.tokens, digest)
        places, placed = self._places.of_step(step)
        by_hand = placed.stop > placed.start
        plan = (
            self._as_placed(drawn, {name: places[name][placed] for name in PLACES})
            if by_hand
            else planner.placed(drawn)
        )
        if (by_hand or self._is_same_layout) and said.plan_digest != plan.plan_digest.hex():
            raise self._damaged(
                step, f"its placement has digest {plan.plan_digest.hex()}, not {said.plan_digest} as planned"
            )
        return plan, after

    def _as_placed(self, drawn: DrawnStep, places: Mapping[str, Int64Array]) -> StepPlan:
        """A step where somebody has placed its samples by hand."""
        planner, about = self._planner, self.manifest
        layout = planner.layout
        here, there = ((of.dp, of.cp, of.micro_batch_size) for of in (layout, about))
        if here != there:
            raise PlanFilesError(
                f"step {drawn.step} of the plan in {self._folder} is placed by hand for dp {there[0]}, cp {there[1]}, "
                f"micro_batch_size {there[2]}; this job has dp {here[0]}, cp {here[1]}, micro_batch_size {here[2]}: "
                f"build it as the plan was made, or plan for its layout"
            )
        try:
            return placed_by_hand(planner, drawn, **places)
        except PlanError as error:
            raise self._damaged(drawn.step, str(error)) from error

    def _sums_of_step(self, step: int) -> _SumsOfStep:
        columns, rows = self._steps.of_step(step)
        if columns["stream"][rows].tolist() != list(self._planner.streams):
            raise self._damaged(step, "steps.parquet has other streams")
        asked, drawn, pool = (columns[f"{name}_tokens"][rows] for name in ("asked", "drawn", "pool"))
        return _SumsOfStep(TokensOfStep(asked=asked, drawn=drawn, pool=pool), str(columns["plan_digest"][rows.start]))

    def _damaged(self, step: int, why: str) -> PlanFilesError:
        return PlanFilesError(f"step {step} of the plan in {self._folder} is damaged: {why}; plan again with --out")


class _SumsOfStep(NamedTuple):
    tokens: TokensOfStep
    plan_digest: str


def _numbers(names: NDArray[Any], known: tuple[str, ...]) -> Int64Array:
    """The place of each name among the known ones.

    Raises:
        ValueError: A name is not among them.
    """
    found, which = np.unique(names, return_inverse=True)
    return np.array([known.index(name) for name in found.tolist()], np.int64)[which.reshape(-1)]


class _RowsOfSteps:
    """A Parquet file whose rows go by `step`, all of a step in one row group."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = pq.ParquetFile(path, page_checksum_verification=True)
            about = self._file.metadata
            of_groups = [about.row_group(g).column(0).statistics for g in range(about.num_row_groups)]
            self._last = np.array([each.max for each in of_groups], np.int64)
        except (OSError, pa.ArrowException, AttributeError) as error:
            raise PlanFilesError(f"{path} is damaged: {error}; plan again with --out") from error
        self._held: tuple[int, dict[str, NDArray[Any]]] | None = None

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def of_step(self, step: int) -> tuple[dict[str, NDArray[Any]], slice]:
        """The columns of the row group that holds a step, and the rows of the step in it."""
        if not len(self._last):
            return {}, slice(0, 0)
        group = min(int(np.searchsorted(self._last, step)), len(self._last) - 1)
        if self._held is None or self._held[0] != group:
            self._held = group, self._columns(group)
        columns = self._held[1]
        start, stop = np.searchsorted(columns["step"], [step, step + 1]).tolist()
        return columns, slice(start, stop)

    def _columns(self, group: int) -> dict[str, NDArray[Any]]:
        try:
            table = self._file.read_row_group(group)
        except (OSError, pa.ArrowException) as error:
            raise PlanFilesError(f"{self._path} is damaged: {error}; plan again with --out") from error
        return {name: table[name].combine_chunks().to_numpy(zero_copy_only=False) for name in table.column_names}


def open_recorded_plan(folder: str, planner: Planner, catalog: str) -> RecordedPlan | None:
    """The plan in a folder; None where no folder is named."""
    return RecordedPlan(Path(folder), planner, catalog) if folder else None
