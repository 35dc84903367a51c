"""Keys of CURVE in a folder: who may ask loaders, and how clients know that it is their loaders that they ask.

Nobody but this process' user, or a group of this process for a file of somebody else's, may read a secret, and other
modes are refused; no secret is in a command line or an environment; a client whose public key is removed is let in no
more. Cost: a few small files. Keys are text of 40 characters (Z85).

    server.secret, server.public          of all loaders
    client-K.secret, client-K.public      of clients; loaders let in whoever has one of the public keys

A machine that only trains needs `server.public` and one `client-K.secret`; one that only serves needs `server.secret`
and the public keys.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from torchmix.errors import OptionError, naming

logger = logging.getLogger(__name__)

KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
"""Z85 of 32 bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyPair:
    """A secret key and its public half."""

    public: str
    secret: str = field(repr=False)


class ServerKeys(msgspec.Struct, frozen=True, kw_only=True):
    """What a loader needs."""

    own: KeyPair
    allowed: Callable[[], frozenset[str]]
    """The public keys of clients, as they are now: they may be added and removed at any time."""


class ClientKeys(msgspec.Struct, frozen=True, kw_only=True):
    """What a client needs."""

    own: KeyPair
    server: str = ""
    """Public key of the loaders."""
    server_of: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Public keys of loaders that have another one, by endpoint."""
    near_now: Callable[[], Mapping[str, str]] = dict
    """Sockets of loaders of this node, as `ipc:///path`, where no keys are needed, by endpoint, as they are now."""

    def server_at(self, endpoint: str) -> str:
        """Public key of the loader at an endpoint."""
        return self.server_of.get(endpoint, self.server)


def write_keys(folder: Path, new_pair: Callable[[], KeyPair], *, num_clients: int) -> None:
    """Make the keys of a server and of clients.

    Args:
        folder: New or empty; gets mode 0700.
        new_pair: Makes a pair.
        num_clients: 1 or more.

    Raises:
        OptionError: The folder has files already.
        OSError: It cannot be written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise OptionError(f"{folder} is not empty: keys are not replaced; name a new folder, or remove this one")
    folder.chmod(0o700)
    try:
        for name in ("server", *(f"client-{number}" for number in range(num_clients))):
            pair = new_pair()
            _write(folder / f"{name}.public", pair.public, 0o644)
            _write(folder / f"{name}.secret", f"{pair.public}\n{pair.secret}", 0o600)
    except OSError:  # all or none: a folder with some would not be taken again
        for path in folder.iterdir():
            path.unlink()
        raise


def server_keys(folder: Path) -> ServerKeys:
    """The keys of a loader.

    Raises:
        OptionError: They are missing, damaged, or readable for others; or no client may come.
    """
    own = _pair(folder / "server.secret")
    paths = _public_paths(folder)
    if not paths:
        raise OptionError(f"{folder} has no client-K.public: nobody could ask; make keys with torchmix keys DIR")
    for path in paths:
        _key(path, _text(path))
    return ServerKeys(own=own, allowed=_PublicKeys(folder).now)


def client_keys(place: Path) -> ClientKeys:
    """The keys of a client.

    Args:
        place: A folder, whose first `client-K.secret` is taken, or such a file.

    Raises:
        OptionError: They are missing, damaged, or readable for others.
    """
    folder = place if place.is_dir() else place.parent
    secrets = sorted(folder.glob("client-*.secret")) if place.is_dir() else [place]
    if not secrets:
        raise OptionError(f"{place} has no client-K.secret; copy one from the folder that torchmix keys made")
    return ClientKeys(own=_pair(secrets[0]), server=_key(folder / "server.public", _text(folder / "server.public")))


class _PublicKeys:
    """The public keys of clients in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last = frozenset[str]()
        self._faults: list[str] = []

    def now(self) -> frozenset[str]:
        """Those that are there. A file without a key lets nobody in; a folder that cannot be listed alters nothing."""
        found, faults = set[str](), []
        try:
            for path in _public_paths(self._folder):
                try:
                    found.add(_key(path, _text(path)))
                except OptionError as error:
                    faults.append(str(error))
            self._last = frozenset(found)
        except OSError as error:
            faults.append(f"the keys of clients cannot be looked at, and stay as they were: {error}")
        for fault in faults:
            if fault not in self._faults:
                logger.warning("%s", fault)
        self._faults = faults
        return self._last


def _public_paths(folder: Path) -> list[Path]:
    """Files of clients' public keys.

    Raises:
        OSError: The folder cannot be listed.
    """
    return sorted(path for path in folder.iterdir() if re.fullmatch(r"client-.+\.public", path.name))


def _pair(path: Path) -> KeyPair:
    lines = _text(path).split("\n")
    if len(lines) != 2:
        raise OptionError(f"{path} holds no pair of keys; make keys with torchmix keys DIR")
    if (fault := mode_fault(path.stat())) is not None:
        raise OptionError(f"{path} is a secret, and {fault}")
    return KeyPair(public=_key(path, lines[0]), secret=_key(path, lines[1]))


def mode_fault(status: os.stat_result) -> str | None:
    """Why a secret of this owner, group and mode is not one; None where it is.

    A Secret of Kubernetes is root's, and of the group `fsGroup` with mode 0440: there the user of the pod reads it by
    the group, and cannot change the mode.
    """
    uid, mode = os.geteuid(), stat.S_IMODE(status.st_mode)
    if not mode & 0o077:
        return None
    is_ours = status.st_uid == uid
    groups = {os.getegid(), *os.getgroups()}
    if not is_ours and not mode & 0o037 and status.st_gid in groups:
        return None
    if is_ours:
        return f"its mode is {mode:04o}, so that others than its owner may reach it; run chmod 600 on it"
    return (
        f"its mode is {mode:04o}, of user {status.st_uid} and group {status.st_gid}, while this process is user {uid}: "
        "such a file is taken where the group is one of this process, may only read, and nobody else may do anything; "
        "in Kubernetes set fsGroup, and defaultMode: 0440"
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path}: no key can be read: {error}; make keys with torchmix keys DIR") from error


def _key(path: Path, text: str) -> str:
    if not KEY.fullmatch(text):
        raise OptionError(f"{path} holds no key of 40 characters; make keys with torchmix keys DIR")
    return text


def _write(path: Path, text: str, mode: int) -> None:
    path.touch(mode, exist_ok=False)  # nobody reads it before it is a secret
    with naming(path):
        path.write_text(f"{text}\n", encoding="ascii")
