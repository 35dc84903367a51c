"""The `loaders` of a recipe, as values.

In: what the user writes. Out: the Structs below. Must hold: as `structs.py`. Cost: none.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Autoscale(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Loaders that follow the coming load of the plan."""

    min: int
    """Loaders that suffice for the first steps of the run; there are never fewer."""
    max: int
    """There are never more."""


class Loaders(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which processes make the steps, and what of each node they may take; it does not affect the order."""

    where: tuple[Literal["node", "remote"], ...] | Literal["in_process", "node", "job", "ray", "remote"] = "node"
    """`node`: in one process for all leaders of a node. `in_process`: in threads of each leader. `job`, `ray` and
    `remote`: as `node`, but that process opens no data file: it asks loaders, which the job runs on each of its nodes,
    or on a Ray cluster, or which `torchmix serve` runs. `[node, remote]`: that process reads while `cpu` suffices, and
    then asks loaders."""
    processes: int | Literal["auto"] = 1
    """Loaders: of each node with `job`, of the cluster with `ray`, of `torchmix serve` with `remote`. `auto`: as many
    as the profile asks for, each with its sources."""
    spares: int = 0
    """Processes of a node that wait, with their imports done, to replace one that is lost; not with `in_process`."""
    cpu: int | None = None
    """Processors of a node for all of this, threads of tokenizers included; None: those that the job may use. With
    `ray`: of all loaders on the cluster; None: those of the cluster. Not with `in_process`."""
    memory: str | int | None = None
    """Bytes, likewise: text such as 8GiB, or a number."""
    endpoints: str | tuple[str, ...] | None = None
    """Where remote loaders are: `tcp://cpu-[0-3]:[7700-7707]`, a folder where they register, or several of these."""
    autoscale: Autoscale | None = None
    """With `ray` and `remote`: bounds on the number of loaders, which the job or `torchmix serve` starts and ends by
    the load that is coming."""
    transform_at: Literal["auto", "loader", "worker"] | dict[str, Literal["auto", "loader", "worker"]] | None = None
    """With `job`, `ray` and `remote`, who maps and tokenizes: the loaders, which None means; or the node worker, which
    then reads the files itself; or whichever costs less by the profile. One word, or a word for some sources; the
    others go by `auto`."""
    address: str | None = None
    """With `ray`: `HOST:PORT` of the cluster, or `auto`, which None means: that of RAY_ADDRESS, or of the first rank's
    machine."""
    keys: str | None = None
    """The folder of this machine's keys for remote loaders, or a file of it; None: loaders of this machine, no keys."""

    @property
    def is_remote(self) -> bool:
        """Whether loaders that `torchmix serve` runs are asked."""
        return "remote" in self.words

    @property
    def words(self) -> tuple[str, ...]:
        """Who reads, in the order in which they are asked."""
        return (self.where,) if isinstance(self.where, str) else self.where
