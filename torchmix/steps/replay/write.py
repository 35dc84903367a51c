"""Plans of steps -> files that can be looked at, and replayed.

In: `StepPlan`s, one after another, each with the cursor before it. Out: `pieces.parquet`, `steps.parquet`,
`states.parquet` and `plan.json`. Must hold: the files appear together and whole, or not at all: they are written aside
and renamed, the manifest last. Cost: memory of one row group, about 100,000 rows; a state takes a kilobyte and some
bytes a stream, a small part of the pieces of its step.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from torchmix import __version__
from torchmix.errors import OptionError
from torchmix.planner.cursor import Cursor
from torchmix.planner.plan import StepPlan
from torchmix.planner.planner import Planner
from torchmix.recipe.build import listed
from torchmix.recipe.fingerprint import key_digests, recipe_fingerprint, recipe_keys
from torchmix.steps.cursor_state import state_of_cursor
from torchmix.steps.replay.manifest import (
    PLAN_VERSION,
    PlanManifest,
    encode_manifest,
    file_of_plan,
    placement_key,
)
from torchmix.steps.replay.tables import MANIFEST, SCHEMAS, columns_of_pieces, columns_of_step
from torchmix.steps.state import encode_state

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

    def add(self, plan: StepPlan, before: Cursor, after: Cursor) -> None:
        """Append one step; steps come in ascending order.

        Args:
            plan: Of the step.
            before: The cursor that it was planned at.
            after: The cursor behind it.
        """
        if self._first is None:
            self._first = before
            self._append_state(before)
        self._append("pieces.parquet", columns_of_pieces(plan))
        self._append("steps.parquet", columns_of_step(plan))
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
        with ExitStack() as stack:
            writers = {
                name: stack.enter_context(
                    pq.ParquetWriter(_aside(folder / name), schema, compression="zstd", write_page_checksum=True)
                )
                for name, schema in SCHEMAS.items()
            }
            files = PlanFiles(writers, planner, catalog)
            yield files
            files.flush()
        _aside(folder / MANIFEST).write_bytes(encode_manifest(files.manifest(folder)))
        for name in (*SCHEMAS, MANIFEST):
            _aside(folder / name).replace(folder / name)
    finally:
        for name in (*SCHEMAS, MANIFEST):
            _aside(folder / name).unlink(missing_ok=True)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")
