"""What Ray runs on a node: one loader process, watched by the actor that has started it.

In: what the loader is told, as JSON. Out: where it listens, and its public key. Must hold: what travels is text; where
each loader has keys of its own, its secret is made on its node and stays there; the loader ends with the actor. Cost: a
worker process of Ray beside each loader, some 100 MB.
"""

from __future__ import annotations

import json
import os

import msgspec

from torchmix.service.job.address import ADDRESS_VARIABLE, bind_of
from torchmix.service.main import LoaderStart
from torchmix.service.pool import LoaderPool
from torchmix.service.server import new_pair


class ActorListens(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor says of its loader."""

    endpoint: str
    public: str = ""
    """Its public key; empty where the keys lie in a folder, or there are none."""


_decode_start = msgspec.json.Decoder(LoaderStart).decode
decode_listens = msgspec.json.Decoder(ActorListens).decode


class LoaderActor:
    """One loader process, started again when it ends. Arguments and results are text."""

    def __init__(self, start: str, sources: str) -> None:
        """Start the loader.

        Args:
            start: A `LoaderStart`, as JSON. Without `bind` it listens at the address of this node. With `allowed`, and
                without keys, it makes a pair of its own.
            sources: Parts of sources by name, as JSON.
        """
        import ray

        told = _decode_start(start)
        address = os.environ.get(ADDRESS_VARIABLE) or ray.util.get_node_ip_address()
        pair = new_pair() if told.allowed and not told.keys else None
        self._public = "" if pair is None else pair.public
        self._pool = LoaderPool(
            [msgspec.structs.replace(told, bind=told.bind or bind_of(address), own=pair, sources=json.loads(sources))]
        )

    def listens(self) -> str:
        """An `ActorListens`, as JSON."""
        return msgspec.json.encode(ActorListens(endpoint=self._pool.endpoints[0], public=self._public)).decode()

    def give(self, sources: str) -> None:
        """Change its sources; JSON."""
        self._pool.give(0, json.loads(sources))

    def leave(self) -> None:
        """Take it from the folder."""
        self._pool.leave(0)

    def close(self) -> None:
        """End the loader."""
        self._pool.close()
