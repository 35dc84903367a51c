"""One real rank that consumes a recipe with images, and writes what came.

    RANK=.. WORLD_SIZE=.. MASTER_..=.. python -m tests.support.image_rank RECIPE OUT TP CP PP STEPS LOADERS LOG MROPE

Out: OUT/RANK.npz with its place, the tokens and labels of all microbatches as far as its role has them, the images that
this rank encodes, and what the other ranks' rows put in the place of each token: a checksum of the pixels of the image,
and the number of the row in it; if MROPE is 1, positions in three dimensions. Images that it decodes itself are noted
in LOG.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import torchmix
from tests.support.decode_log import install
from torchmix.parallel import HeldRows, Topology, place_rows, route


def checksum(pixels: np.ndarray) -> float:
    """A number that tells images apart: the sum of weighted bytes, exact in float64."""
    flat = pixels.reshape(-1).astype(np.int64)
    return float((flat * (np.arange(len(flat)) % 997 + 1)).sum())


def main(arguments: list[str]) -> None:
    recipe, out = arguments[0], Path(arguments[1])
    tp, cp, pp, steps = map(int, arguments[2:6])
    loaders: Any = arguments[6]
    install(arguments[7])
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    topology = Topology.from_torchrun(tp=tp, cp=cp, pp=pp)
    tokens, labels, placed, images, totals, segments, positions = [], [], [], [], [], [], []
    with torchmix.build_loader(recipe, topology=topology, max_steps=steps, loaders=loaders) as loader:
        step = []
        for microbatch in loader:
            step.append(microbatch)
            if not microbatch.is_last_of_step:
                continue
            batch = step[0].modules["vision"]
            pixels, stops = batch.arrays["pixel_values"].numpy(), [0, *batch.units.cumsum(0).tolist()]
            rows = torch.zeros(int(batch.rows.sum()), 2, dtype=torch.float64)
            first = 0
            for number, count in enumerate(batch.rows.tolist()):
                code = checksum(pixels[stops[number] : stops[number + 1]])
                rows[first : first + count, 0] = code
                rows[first : first + count, 1] = torch.arange(count, dtype=torch.float64) + 1
                images.append([code, *(int(batch.arrays[key][number]) for key in ("source", "row", "number"))])
                first += count
            assert batch.cu_seqlens[-1] == len(pixels)
            held = HeldRows(route(rows, batch.routes))
            for each in step:
                if each.tokens is not None:
                    zeros = torch.zeros(*each.tokens.shape, 2, dtype=torch.float64)
                    placed.append(place_rows(zeros, held.rows, batch.routes, each.index).detach().numpy())
                    tokens.append(each.tokens.numpy())
                    if arguments[8] == "1":
                        mrope = each.mrope_position_ids("vision")
                        assert mrope is not None
                        positions.append(mrope.permute(1, 2, 0).numpy())
                if each.labels_int32 is not None:
                    labels.append(each.labels_int32.numpy())
                segments.append(each.cu_seqlens_padded.numpy())
                totals.append(float(each.num_tokens_global))
            step = []
    place = topology.coordinates
    np.savez(
        out / f"{topology.rank}.npz",
        place=np.array([place.dp, place.pp, place.cp, place.tp]),
        tokens=np.array(tokens),
        labels=np.array(labels),
        placed=np.array(placed),
        positions=np.array(positions),
        images=np.array(images).reshape(-1, 4),
        totals=np.array(totals),
        segments=np.concatenate(segments),
        segments_stop=np.cumsum([len(each) for each in segments]),
    )
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
