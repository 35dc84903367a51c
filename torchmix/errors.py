"""Every error torchmix raises on purpose, as one tree.

    TorchmixError
    |-- RecipeError (ValueError)        the user's text: unknown key, wrong type, shares that do not sum
    |-- OptionError (ValueError)        an argument of a call: out of its range, of a wrong type, an unknown word
    |-- LengthUnknown (TypeError)       `len` of a loader whose end is not known
    |-- CatalogError                    what lies on disk
    |   |-- CatalogMissing              no catalog yet, or not for these sources
    |   |-- CatalogStale                the catalog was built for other settings or another format version
    |   |-- CatalogConflict             two index runs published to one store at the same time
    |   |-- SourceUnreadable            missing file or column, wrong type, no documents
    |   |-- SourceChanged               a file is not the one that was indexed
    |   |-- ItemUnreadable             bytes that are no image, a damaged one, or one whose header lies
    |   |-- CorruptPage                 bytes that do not decode, or decode to other sizes than planned
    |   |-- SideTableError              a table of properties with double or missing keys
    |   |-- DenyListError               a list of denied documents that fits no catalog, or not this one
    |   `-- TooManyBadRows              more of a source cannot be read than `max_bad` allows
    |-- PlanError                       a step that cannot be planned
    |   |-- SourceExhausted             a source gave its `max_epochs` and the recipe says `error`
    |   |-- DocumentTooLong             `overflow: error` met a document longer than a sample
    |   |-- PlanDiverged                two leaders planned the same step differently
    |   `-- PlanFilesError              a plan on disk that is damaged, or of another recipe or catalog
    |-- TopologyError (ValueError)      sizes that do not divide, ranks that do not exist
    |-- StateError (ValueError)         a state that this loader cannot continue from
    |   |-- StateVersion                written by another format version
    |   |-- StateMismatch               of another recipe, catalog or (inside a step) layout
    |   `-- HistoryMissing              the steps before it cannot be planned: no record of the edits of its run
    |-- RankLost                        another rank was killed, stopped or failed
    |-- OpenFilesLimit                  this process may not have as many open files as its held steps need
    |-- MemoryLimit                     the process that reads for this rank may not allocate more
    |-- WorkerLost                      the process that reads for this rank was killed
    |-- LoaderLost                      no shared loader answers, and the files are not seen here
    |-- WireError                       bytes from another rank or a loader that are no message to this process
    |-- NativeError                     the native library is required and not there, or refuses a call
    `-- LoaderClosed (RuntimeError)     used after close()

A message says what failed with its values, where, and what to do. Facts for programs are attributes with defaults. An
error can be rebuilt from its `args`, which is how it crosses from one process to another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike, strerror


class TorchmixError(Exception):
    """Any error that torchmix raises on purpose."""


class RecipeError(TorchmixError, ValueError):
    """The recipe, or a value given in its place, is wrong.

    `where` is the path of keys ("sources.web.max_epochs"); `line` counts from 1, and `file` is the recipe's path; 0 and
    empty if not from a file.
    """

    def __init__(self, message: str = "", where: str = "", line: int = 0, file: str = "") -> None:
        super().__init__(message, where, line, file)
        self.message = message
        self.where = where
        self.line = line
        self.file = file

    def __str__(self) -> str:
        place = f"line {self.line}: " if self.line else ""
        key = f"{self.where}: " if self.where else ""
        return f"{place}{key}{self.message}"


def key_path(where: str, name: str) -> str:
    """The dotted path of the key `name` below `where`, as RecipeError has it."""
    return f"{where}.{name}" if where else name


class OptionError(TorchmixError, ValueError):
    """An argument of a call is out of its range, has a wrong type, or is not one of the allowed words."""


class LengthUnknown(TorchmixError, TypeError):
    """`len` of a loader whose end is not known. It is a TypeError, so that `list(loader)` works without a length."""


class CatalogError(TorchmixError):
    """Something on disk is missing, changed or damaged.

    Where it is is said once: code that reads a format knows the row and the byte, and code that opens a file of a
    source adds `where`, "source 'web': /data/web.parquet".
    """

    def __init__(self, message: str = "", where: str = "", row: int = -1, offset: int = -1) -> None:
        has_place = row >= 0 or offset >= 0
        super().__init__(*(message, where, row, offset)[: 4 if has_place else 2 if where else 1])

    @property
    def message(self) -> str:
        """What is wrong, and what to do."""
        return str(self.args[0])

    @property
    def where(self) -> str:
        """Source and file; "" where neither is known."""
        return str(self.args[1]) if len(self.args) > 1 else ""

    @property
    def row(self) -> int:
        """Row of the file, -1 where none is at fault."""
        return int(self.args[2]) if len(self.args) > 2 else -1

    @property
    def offset(self) -> int:
        """Byte of the file, -1 where none is at fault."""
        return int(self.args[3]) if len(self.args) > 2 else -1

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" if self.where else self.message

    def locate(self, where: str) -> None:
        """Say in which source and file it happened, unless that is said already."""
        if not self.where:
            self.args = (self.message, where, *self.args[2:])


def where_of(source: str, path: object) -> str:
    """What `CatalogError.where` says about a file of a source."""
    return f"source {source!r}: {path}"


@contextmanager
def located(where: str) -> Iterator[None]:
    """Errors about what lies on disk, raised inside of the `with` block, say that it is `where`."""
    try:
        yield
    except CatalogError as error:
        error.locate(where)
        raise


@contextmanager
def naming(path: str | PathLike[str]) -> Iterator[None]:
    """An OSError of the `with` block that names no file, as that of a full disk, is of this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.strerror, error.filename = strerror(error.errno), str(path)  # pyarrow's text names no file either
        raise


class CatalogMissing(CatalogError):
    """There is no catalog at the place the recipe names, or it lacks a source."""


class CatalogStale(CatalogError):
    """The catalog was built for other settings, or by another version of the format."""


class CatalogConflict(CatalogError):
    """Another process published the catalog to its store meanwhile."""


class SourceUnreadable(CatalogError):
    """A file or column is missing, has the wrong type, or holds no documents."""


class SourceChanged(CatalogError):
    """A file is not the one that was indexed: its size or its footer differs."""


class CorruptPage(CatalogError):
    """Bytes of a page that do not decode, or decode to other sizes than the catalog holds."""


class ItemUnreadable(CatalogError):
    """Bytes are no image, do not decode, or are not as large as their header says."""


class SideTableError(CatalogError):
    """A table of properties does not fit a source: keys are there twice, or missing, or are no keys."""


class DenyListError(CatalogError):
    """A deny-list has other columns than it needs, or names a document that the sources do not have."""


class TooManyBadRows(CatalogError):
    """More of a source cannot be read than its `max_bad` allows."""


class PlanError(TorchmixError):
    """A step cannot be planned."""


class SourceExhausted(PlanError):
    """A source has given `max_epochs` epochs and the recipe says `on_exhausted: error`."""


class DocumentTooLong(PlanError):
    """A document does not fit a sample and the recipe says `overflow: error`."""


class PlanDiverged(PlanError):
    """Two leaders hold different plans of the same step."""


class PlanFilesError(PlanError):
    """A plan on disk is missing, damaged or cut, or is of another recipe, catalog or part."""


class TopologyError(TorchmixError, ValueError):
    """Parallel sizes that do not divide, or a rank outside them."""


class StateError(TorchmixError, ValueError):
    """A state that this loader cannot continue from."""


class StateVersion(StateError):
    """The state was written by another version of the state's format."""


class StateMismatch(StateError):
    """The state belongs to another recipe, catalog or (inside a step) layout."""


class HistoryMissing(StateError):
    """What a run had before an edit is not recorded, is damaged, or is of another run."""


class RankLost(TorchmixError):
    """Another rank was killed, stopped, or failed; `rank` is its global rank, -1 if not known."""

    def __init__(self, message: str = "", rank: int = -1) -> None:
        super().__init__(message, rank)
        self.message = message
        self.rank = rank

    def __str__(self) -> str:
        return self.message


class MemoryLimit(TorchmixError):
    """A process may not allocate more memory: `loaders.memory`, or the system, bounds what it has."""


class WorkerLost(TorchmixError):
    """The worker process that reads for this rank ended by itself; most often the kernel had no memory left."""


class LoaderLost(TorchmixError):
    """No shared loader answers, or all refuse this client."""


class OpenFilesLimit(TorchmixError):
    """This process may not have as many open files as the steps that it holds need."""


class WireError(TorchmixError):
    """The bytes from rank `rank` are not the exchange that this rank waits for."""

    def __init__(self, message: str = "", rank: int = -1) -> None:
        super().__init__(message, rank)
        self.message = message
        self.rank = rank

    def __str__(self) -> str:
        return self.message


class NativeError(TorchmixError):
    """The native library is required and cannot be used, or it refuses a call with an offset outside its array."""


class LoaderClosed(TorchmixError, RuntimeError):
    """The loader was used after `close()`."""
