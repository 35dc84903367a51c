"""Keys of CURVE in a folder: who may ask loaders, and how clients know that it is their loaders that they ask.

In: a folder. Out: the pair of a server with the public keys that it lets in; the pair of a client with the public key
of its server. Must hold: secrets are files of mode 0600 in a folder of mode 0700, and others are refused; no secret is
in a command line or an environment. Cost: a few small files. Keys are text of 40 characters (Z85).

    server.secret, server.public          of all loaders
    client-K.secret, client-K.public      of clients; loaders let in whoever has one of the public keys

A machine that only trains needs `server.public` and one `client-K.secret`; one that only serves needs `server.secret`
and the public keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from torchmix.errors import OptionError

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
    """The public keys of clients, as they are now: more may be added at any time."""


class ClientKeys(msgspec.Struct, frozen=True, kw_only=True):
    """What a client needs."""

    own: KeyPair
    server: str = ""
    """Public key of the loaders."""
    server_of: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Public keys of loaders that have another one, by endpoint."""
    near_of: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Sockets of loaders of this node, as `ipc:///path`, where no keys are needed, by endpoint."""

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
    for name in ("server", *(f"client-{number}" for number in range(num_clients))):
        pair = new_pair()
        _write(folder / f"{name}.public", pair.public, 0o644)
        _write(folder / f"{name}.secret", f"{pair.public}\n{pair.secret}", 0o600)


def server_keys(folder: Path) -> ServerKeys:
    """The keys of a loader.

    Raises:
        OptionError: They are missing, damaged, or readable for others; or no client may come.
    """
    found = ServerKeys(own=_pair(folder / "server.secret"), allowed=lambda: _public_keys(folder))
    if not found.allowed():
        raise OptionError(f"{folder} has no client-K.public: nobody could ask; make keys with torchmix keys DIR")
    return found


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


def _public_keys(folder: Path) -> frozenset[str]:
    return frozenset(_key(path, _text(path)) for path in sorted(folder.glob("client-*.public")))


def _pair(path: Path) -> KeyPair:
    lines = _text(path).split("\n")
    if len(lines) != 2:
        raise OptionError(f"{path} holds no pair of keys; make keys with torchmix keys DIR")
    if path.stat().st_mode & 0o077:
        raise OptionError(f"{path} is a secret, and others than its owner may read it: chmod 600 {path}")
    return KeyPair(public=_key(path, lines[0]), secret=_key(path, lines[1]))


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
    path.write_text(f"{text}\n", encoding="ascii")
