"""Where loaders listen: written as text with ranges, or registered as files in a folder.

A folder is looked at again and again, so that loaders may come and go, and get other sources; a registration is a small
file that appears whole. Cost: a listing of the folder.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from torchmix.errors import OptionError

MOST_ENDPOINTS = 4096
MOST_IPC_BYTES = 107
"""Most bytes of the path of a Unix socket."""
SUFFIX = ".loader"
NOBODYS_KEY = "0" * 40
_RANGE = re.compile(r"\[(\d+)-(\d+)\]")


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """What a loader's file in a folder says."""

    endpoint: str
    """Where it listens."""
    sources: dict[str, int] | None = None
    """Parts of each source that it has, of those that all loaders of the source have; None: it reads all sources."""
    public: str = ""
    """Its public key, where each loader has its own."""
    near: str = ""
    """A socket of it, as `ipc:///path`, where processes of its node need no keys; empty: none."""


_decode = msgspec.json.Decoder(Registration).decode


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """Where a client finds its loaders."""

    fixed: tuple[str, ...] = ()
    """Endpoints that are always looked for."""
    folders: tuple[Path, ...] = ()
    """Folders with registrations."""
    parts_of: Mapping[str, Mapping[str, int]] = msgspec.field(default_factory=dict)
    """Parts of sources that some of `fixed` have; the others read all."""

    def now(self) -> dict[str, Mapping[str, int] | None]:
        """All endpoints at this moment, sorted, with the parts of sources that each has; None: it reads all."""
        found: dict[str, Mapping[str, int] | None] = {one: self.parts_of.get(one) for one in self.fixed}
        for folder in self.folders:
            found.update({one.endpoint: one.sources for one in registered(folder)})
        return {endpoint: found[endpoint] for endpoint in sorted(found)}

    def __str__(self) -> str:
        return ", ".join([*self.fixed, *map(str, self.folders)])


def endpoints_of(texts: Sequence[str], directory: Path) -> Endpoints:
    """Endpoints as a user writes them.

    Args:
        texts: `tcp://` or `ipc://` with ranges `[a-b]`, or folders.
        directory: Folder that relative folders start from.

    Raises:
        OptionError: A text is neither.
    """
    fixed: list[str] = []
    folders: list[Path] = []
    for text in texts:
        if text.startswith(("tcp://", "ipc://")):
            fixed += expanded(text)
        elif "://" in text:
            raise OptionError(f"endpoint {text!r}: it begins with tcp:// or ipc://, or is a folder of registrations")
        else:
            folders.append(directory / text)
    return Endpoints(fixed=tuple(sorted(set(fixed))), folders=tuple(folders))


def expanded(text: str) -> list[str]:
    """Each endpoint of a text with ranges: `tcp://cpu-[0-3]:7700` is four.

    Raises:
        OptionError: A range is empty, or there are more than 4096 endpoints.
    """
    found = [text]
    while any(_RANGE.search(one) for one in found):
        longer = []
        for one in found:
            match = _RANGE.search(one)
            if match is None:
                longer.append(one)
                continue
            start, stop = int(match[1]), int(match[2])
            if not start <= stop < start + MOST_ENDPOINTS:
                raise OptionError(f"endpoint {text!r}: the range {match[0]} goes from the smaller number to the larger")
            width = len(match[1]) if match[1].startswith("0") else 0
            longer += [
                f"{one[: match.start()]}{number:0{width}d}{one[match.end() :]}" for number in range(start, stop + 1)
            ]
        found = longer
        if len(found) > MOST_ENDPOINTS:
            raise OptionError(f"endpoint {text!r} is more than {MOST_ENDPOINTS} endpoints")
    return found


class Registry:
    """The registrations of the loaders that this process keeps, in a folder.

    Who keeps loaders registers them, and nobody else: it alone knows which of them are there, also after a machine or a
    process between was lost. It holds a lock on each file. The kernel lets go of a lock however the process ends, so a
    file whose lock is free is left over, and whoever opens the folder next removes it.
    """

    def __init__(self, folder: Path) -> None:
        """Make the folder, and remove what killed keepers have left there.

        Args:
            folder: Where clients look.

        Raises:
            OSError: The folder cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            _remove_left(path)
        self.folder = folder
        """As it was given."""
        self._kept: dict[str, tuple[Registration, int]] = {}
        """What each file says, and the descriptor that holds its lock, by endpoint."""
        self._lock = threading.Lock()

    @property
    def endpoints(self) -> list[str]:
        """Endpoints that are registered here, sorted."""
        return sorted(self._kept)

    def put(self, endpoint: str, sources: Mapping[str, int] | None = None, public: str = "", near: str = "") -> None:
        """Write a loader's registration, or replace it.

        Args:
            endpoint: Where the loader listens.
            sources: Parts of each source that it has; None: it reads all.
            public: Its public key, where each loader has its own.
            near: A socket of it for its own node.

        Raises:
            OSError: The folder cannot be written.
        """
        parts = None if sources is None else dict(sources)
        with self._lock:
            self._put(Registration(endpoint=endpoint, sources=parts, public=public, near=near))

    def hold(self, wanted: Sequence[Registration]) -> None:
        """Have these registrations, and no others.

        Raises:
            OSError: The folder cannot be written.
        """
        with self._lock:
            for one in wanted:
                if one.endpoint not in self._kept or self._kept[one.endpoint][0] != one:
                    self._put(one)
        for endpoint in set(self.endpoints) - {one.endpoint for one in wanted}:
            self.remove(endpoint)

    def _put(self, one: Registration) -> None:
        path = registration_path(self.folder, one.endpoint)
        new = self.folder / f".{path.stem}.{os.getpid()}"
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            with suppress(OSError):  # of a file system without locks: there no file counts as left over
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(descriptor, msgspec.json.encode(one) + b"\n")
            new.replace(path)
        except BaseException:
            os.close(descriptor)
            raise
        if one.endpoint in self._kept:
            os.close(self._kept[one.endpoint][1])
        self._kept[one.endpoint] = one, descriptor

    def remove(self, endpoint: str) -> None:
        """Remove a registration, if there is one: clients ask this loader no more."""
        with self._lock:
            if endpoint in self._kept:
                registration_path(self.folder, endpoint).unlink(missing_ok=True)
                os.close(self._kept.pop(endpoint)[1])

    def look(self) -> None:
        """Write again what somebody else has removed, as where locks of other machines are not seen."""
        with self._lock:
            for one, _ in list(self._kept.values()):
                if not registration_path(self.folder, one.endpoint).exists():
                    self._put(one)

    def close(self) -> None:
        """Remove all; may be called again."""
        for endpoint in self.endpoints:
            self.remove(endpoint)


def _remove_left(path: Path) -> None:
    """Remove a registration whose keeper has gone."""
    with suppress(OSError):  # another user's, or it has just gone
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(path.lstat(), os.fstat(descriptor)):
                path.unlink()
        finally:
            os.close(descriptor)


def registration_path(folder: Path, endpoint: str) -> Path:
    """The file of a loader."""
    name = re.sub(r"[^\w.-]+", "-", endpoint.partition("://")[2]).strip("-")
    return folder / f"{name}{SUFFIX}"


def registered(folder: Path) -> list[Registration]:
    """The loaders that are registered in a folder; none where there is no such folder."""
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []:
        try:
            one = _decode(path.read_bytes())
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):  # it has just been removed, or is no registration
            continue
        if one.endpoint.startswith(("tcp://", "ipc://")) and len(one.endpoint) <= 4096:
            found.append(one)
    return found


class KeysOfFolders(Mapping[str, str]):
    """Public key of each loader that is registered in some folders, by endpoint, as it is now."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Nothing is read."""
        self._folders = folders
        self._seen: dict[str, str] = {}

    @property
    def near_of(self) -> dict[str, str]:
        """Sockets for their own node of those that have one, by endpoint."""
        return {one.endpoint: one.near for folder in self._folders for one in registered(folder) if one.near}

    def _now(self) -> dict[str, str]:
        return {one.endpoint: one.public for folder in self._folders for one in registered(folder)}

    def __getitem__(self, endpoint: str) -> str:
        """The key; of a loader that has just left the last one, or one that nobody has."""
        self._seen.update(self._now())
        return self._seen.get(endpoint) or NOBODYS_KEY

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


def with_port(bind: str, number: int) -> str:
    """The endpoint of the loader with a number, of several that one command starts: ports count up from the first, and
    sockets in a folder are numbered.

    Raises:
        OptionError: It is neither `tcp://address:port` nor `ipc:///folder`.
    """
    if bind.startswith("ipc://"):
        return f"{bind}/{number}"
    match = re.fullmatch(r"(tcp://.+:)(\d+)", bind)
    if match is None or not 0 <= int(match[2]) + number < 1 << 16:
        raise OptionError(f"--bind {bind}: write tcp://ADDRESS:PORT, as tcp://127.0.0.1:7700; port 0: any free one")
    return f"{match[1]}{int(match[2]) + number if int(match[2]) else 0}"


def is_beyond_this_machine(endpoint: str) -> bool:
    """Whether an address may be reached from other machines."""
    if endpoint.startswith("ipc://"):
        return False
    try:
        return not ipaddress.ip_address(urlsplit(endpoint).hostname or "").is_loopback
    except ValueError:  # a name, an interface or `*`
        return urlsplit(endpoint).hostname != "localhost"


def check_keys(bind: str, *, has_keys: bool) -> None:
    """Refuse TCP without keys: every user of a machine reaches its loopback, and so do the containers of a pod.

    Raises:
        OptionError: It is `tcp://`, and there are no keys.
    """
    if has_keys or bind.startswith("ipc://"):
        return
    who = "from other machines" if is_beyond_this_machine(bind) else "by every user of this machine"
    raise OptionError(
        f"{bind} is reached {who}: loaders listen over TCP only with keys. Make some with torchmix keys DIR "
        "--clients N, and pass --keys DIR; or leave --bind out, and they listen at sockets that this user alone reaches"
    )


def is_own_socket(endpoint: str) -> bool:
    """Whether `ipc:///path` is there, in a folder that this user alone can write: what listens there is this user's."""
    path = Path(endpoint.removeprefix("ipc://"))
    try:
        status = path.parent.stat()
        return bool(endpoint) and path.is_socket() and status.st_uid == os.getuid() and not status.st_mode & 0o077
    except OSError:
        return False


def check_ipc(endpoint: str) -> None:
    """Refuse a socket that others could reach or that is in use: a second bind would take it from a live loader.

    Raises:
        OptionError: The path is too long or taken, or its folder is not of this user alone.
    """
    if not endpoint.startswith("ipc://"):
        return
    path = Path(endpoint.removeprefix("ipc://"))
    if len(os.fsencode(path)) > MOST_IPC_BYTES:
        raise OptionError(
            f"{endpoint}: the path of a socket has at most {MOST_IPC_BYTES} bytes; set TMPDIR to a short folder"
        )
    try:
        status = path.parent.stat()
    except OSError as error:
        raise OptionError(f"{endpoint}: {error}") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise OptionError(f"{endpoint}: {path.parent} must be a folder of this user alone; chmod 700 {path.parent}")
    if path.exists():
        raise OptionError(f"{endpoint}: {path} exists, and a loader may listen there; choose another path")
