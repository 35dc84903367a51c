"""EODs inside the documents of a .bin: what a loader hands out against Megatron's own masks and positions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.indexed_datasets import write_dataset
from tests.support.loaders import run_job
from tests.support.megatron_masks import megatron_masks
from torchmix.constructor.fields import Microbatch
from torchmix.errors import RecipeError, TopologyError
from torchmix.indexing.scan import index_recipe
from torchmix.parallel.topology import Topology
from torchmix.recipe.load import load_recipe
from torchmix.stateful.open import build_loader

EOD = 3
LENGTH = 64
FLAGS = [(p, a, loss) for p in (False, True) for a in (False, True) for loss in (False, True)]
"""--reset-position-ids, --reset-attention-mask, --eod-mask-loss"""


def write_job(folder: Path, *, packing: str, reset_id: str = f"reset_id: {EOD}") -> Path:
    """A .bin whose documents end with an EOD, and hold several before."""
    rng = np.random.default_rng(1)
    sequences = [
        np.append(np.where((ids := rng.integers(0, 99, count)) % 11 == 0, EOD, ids), EOD)
        for count in rng.integers(1, LENGTH, 600).tolist()  # none longer than a sample: that would come in pieces
    ]
    write_dataset(folder / "web", sequences)
    path = folder / "recipe.yaml"
    path.write_text(
        f"version: 1\nseed: 4\nbatch: {{samples: 8, length: {LENGTH}}}\n"
        f"sources:\n  web: {{path: web, format: megatron, {reset_id}}}\nmixture: {{web: 100%}}\npacking: {packing}\n",
        encoding="utf-8",
    )
    index_recipe(load_recipe(path), folder)
    return path


def packing_of(*, positions: bool, attention: bool, mask: bool) -> str:
    """The recipe's words for Megatron's three switches."""
    return (
        f"{{method: concat, boundaries: {'document' if attention else 'none'}, "
        f"positions: {'document' if positions else 'sample'}, reset_loss: {'mask' if mask else 'keep'}}}"
    )


def attention_of(microbatch: Microbatch, sample: int) -> torch.Tensor:
    """What Megatron's dense mask says, from cu_seqlens: True where a token does not see another."""
    stops = microbatch.cu_seqlens_padded.tolist()
    segment = np.searchsorted(stops, np.arange(sample * LENGTH, (sample + 1) * LENGTH), side="right")
    same = torch.from_numpy(segment[:, None] == segment[None, :])
    return ~(same & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())


@pytest.mark.slow
@pytest.mark.parametrize(("positions", "attention", "mask"), FLAGS)
def test_masks_and_positions_are_megatrons_token_for_token(
    positions: bool, attention: bool, mask: bool, tmp_path: Path
) -> None:
    is_nothing = not (positions or attention or mask)
    packing = packing_of(positions=positions, attention=attention, mask=mask)
    path = write_job(tmp_path, packing=packing, reset_id="max_epochs: 1" if is_nothing else f"reset_id: {EOD}")
    masks_of = megatron_masks()
    inner = 0
    with build_loader(path, micro_batch_size=2, loaders="in_process", max_steps=12) as loader:
        for microbatch in loader:
            assert microbatch.tokens is not None and microbatch.position_ids is not None
            assert microbatch.labels_int32 is not None and microbatch.loss_mask is not None
            for sample in range(2):
                tokens = microbatch.tokens[sample]
                attention_mask, loss_mask, position_ids = masks_of(tokens, EOD, positions, attention, mask, True)
                assert torch.equal(microbatch.position_ids[sample], position_ids)
                assert torch.equal(attention_of(microbatch, sample), attention_mask[0])
                is_eod = tokens == EOD
                if mask:
                    assert torch.equal(microbatch.loss_mask[sample], loss_mask)
                else:  # the last token of a document has no label in torchmix; in Megatron the next document's first
                    assert bool(microbatch.loss_mask[sample][~is_eod].all())
                    inner += int(microbatch.loss_mask[sample][is_eod].sum())
    assert mask or inner > 100


@pytest.mark.parametrize("loaders", ["in_process", "node"])
def test_tokens_to_divide_by_are_those_that_have_a_loss(loaders: str, tmp_path: Path) -> None:
    path = write_job(tmp_path, packing="{method: best_fit}")
    with build_loader(path, micro_batch_size=2, loaders=loaders, max_steps=3) as loader:
        microbatches = list(loader)
    for step in range(3):
        of_step = [microbatch for microbatch in microbatches if microbatch.step == step]
        loss_tokens = sum(int(m.loss_mask.sum()) for m in of_step if m.loss_mask is not None)
        assert {m.num_tokens_global for m in of_step} == {loss_tokens}


def test_all_replicas_and_peers_divide_by_the_tokens_of_all(tmp_path: Path) -> None:
    path = write_job(tmp_path, packing="{method: best_fit, boundaries: none, positions: document}")
    ranks = run_job(path, Topology(dp=2, cp=2), steps=1, micro_batch_size=2)
    assert len({microbatch.num_tokens_global for rank in ranks for microbatch in rank.microbatches}) == 1
    loss_tokens = sum(
        int(microbatch.loss_mask.sum())
        for rank in ranks
        for microbatch in rank.microbatches
        if microbatch.loss_mask is not None
    )
    assert ranks[0].microbatches[0].num_tokens_global == loss_tokens


def test_samples_and_their_order_are_the_same_with_and_without_resets(tmp_path: Path) -> None:
    found = []
    for folder, reset_id in (("with", f"reset_id: {EOD}"), ("without", "max_epochs: 9")):
        path = write_job(tmp_path / folder, packing="{method: best_fit}", reset_id=reset_id)
        with build_loader(path, micro_batch_size=2, loaders="in_process", max_steps=4) as loader:
            tokens = [microbatch.tokens.tolist() for microbatch in loader if microbatch.tokens is not None]
            found.append((tokens, loader.order_digest))
    assert found[0] == found[1]


def test_slices_of_documents_that_only_reading_finds_are_refused_by_name(tmp_path: Path) -> None:
    path = write_job(tmp_path, packing="{method: best_fit}")
    with pytest.raises(TopologyError, match="documents of web also end at each reset_id inside a row"):
        run_job(path, Topology(cp=2), steps=1, micro_batch_size=2)


def test_an_id_at_which_nothing_resets_is_refused(tmp_path: Path) -> None:
    packing = "{boundaries: none, reset_loss: keep}"
    with pytest.raises(RecipeError, match=r"sources\.web\.reset_id: nothing resets at it"):
        write_job(tmp_path, packing=packing)
