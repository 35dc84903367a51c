"""What a rank got of a recipe with images, as arrays that the oracle of `image_oracle.py` reads.

The rows that an encoder would give are a checksum of the image's pixels, and the number of the row in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from torchmix.constructor.fields import Microbatch
from torchmix.parallel import Routes, Topology, place_rows


def checksum(pixels: np.ndarray) -> float:
    """A number that tells images apart: the sum of weighted bytes, exact in float64."""
    flat = np.ascontiguousarray(pixels).reshape(-1)
    flat = (flat.view(np.uint8) if flat.dtype.kind == "f" else flat).astype(np.int64)
    return float((flat * (np.arange(len(flat)) % 997 + 1)).sum())


@dataclass(kw_only=True)
class Record:
    """Takes the steps of one rank."""

    topology: Topology
    with_mrope: bool = False
    module: str = "vision"
    unit_array: str = "pixel_values"
    steps: int = 0
    tokens: list[np.ndarray] = field(default_factory=list)
    labels: list[np.ndarray] = field(default_factory=list)
    placed: list[np.ndarray] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    images: list[list[float]] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    segments: list[np.ndarray] = field(default_factory=list)

    def encode(self, step: Sequence[Microbatch]) -> tuple[torch.Tensor, Routes]:
        """The rows of the images that this rank encodes in a step."""
        batch = step[0].modules[self.module]
        pixels, stops = batch.arrays[self.unit_array].numpy(), [0, *batch.units.cumsum(0).tolist()]
        rows = torch.zeros(int(batch.rows.sum()), 2, dtype=torch.float64)
        first = 0
        for number, count in enumerate(batch.rows.tolist()):
            code = checksum(pixels[stops[number] : stops[number + 1]])
            rows[first : first + count, 0] = code
            rows[first : first + count, 1] = torch.arange(count, dtype=torch.float64) + 1
            self.images.append([code, *(int(batch.arrays[key][number]) for key in ("source", "row", "number"))])
            first += count
        assert batch.cu_seqlens[-1] == len(pixels)
        return rows, batch.routes

    def embed(self, step: Sequence[Microbatch], received: torch.Tensor, routes: Routes) -> None:
        """Place the rows that came."""
        self.steps += 1
        for each in step:
            if each.tokens is not None:
                zeros = torch.zeros(*each.tokens.shape, 2, dtype=torch.float64)
                self.placed.append(place_rows(zeros, received, routes, each.index).detach().numpy())
                self.tokens.append(each.tokens.numpy())
                if self.with_mrope:
                    mrope = each.mrope_position_ids("vision")
                    assert mrope is not None
                    self.positions.append(mrope.permute(1, 2, 0).numpy())
            if each.labels_int32 is not None:
                self.labels.append(each.labels_int32.numpy())
            self.segments.append(each.cu_seqlens_padded.numpy())
            self.totals.append(float(each.num_tokens_global))

    def arrays(self) -> dict[str, np.ndarray]:
        """What `image_oracle.check` compares."""
        place = self.topology.coordinates
        return {
            "place": np.array([place.dp, place.pp, place.cp, place.tp]),
            "steps": np.array(self.steps),
            "tokens": np.array(self.tokens),
            "labels": np.array(self.labels),
            "placed": np.array(self.placed),
            "positions": np.array(self.positions),
            "images": np.array(self.images).reshape(-1, 4),
            "totals": np.array(self.totals),
            "segments": np.concatenate(self.segments),
            "segments_stop": np.cumsum([len(each) for each in self.segments]),
        }


def exchanged(rows: Sequence[torch.Tensor], routes: Sequence[Routes], rank: int) -> torch.Tensor:
    """What a rank receives of the rows of all ranks: a loop of sends, in the place of `route`."""
    parts = [
        rows[sender][first : first + count]
        for sender, of_sender in enumerate(routes)
        for receiver, first, count, _ in of_sender.sends.tolist()
        if receiver == rank
    ]
    return torch.cat([rows[rank][:0], *parts])
