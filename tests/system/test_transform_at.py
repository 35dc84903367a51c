"""`loaders.transform_at`: rows of a source are transformed where it says, and the tensors do not change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.loaders import run_job, same_microbatches
from tests.support.scaled_jobs import write_scaled_job
from torchmix.errors import CatalogMissing, OptionError
from torchmix.parallel.topology import Topology

pytestmark = pytest.mark.system
STEPS = 12
MAP = """\
import pathlib

def remote(columns, *, row, epoch, seed):
    words = pathlib.Path("/proc/self/cmdline").read_text()
    where = "loader" if "service.main" in words else "worker" if "steps.worker" in words else "here"
    with open({log!r}, "a") as file:
        file.write(f"{{where}} {{len(row)}}\\n")
    return {{"text": columns["text"]}}

remote.version = 1
"""


def test_rows_are_transformed_where_it_says(tmp_path: Path) -> None:
    recipe = write_scaled_job(tmp_path, least=1, most=4, module="placed_map", sleep_s=0)
    log = tmp_path / "log"
    (tmp_path / "placed_map.py").write_text(MAP.format(log=str(log)))
    here = run_job(recipe, Topology(dp=2), steps=STEPS)
    for transform_at, expected in (
        ({"slow": "worker", "web": "loader"}, {"worker"}),
        ({"slow": "loader", "web": "worker"}, {"loader"}),
        ("worker", {"worker"}),
        ("auto", {"loader"}),  # by the profile a token of `slow` takes 100 us, which fills the node worker
    ):
        log.write_text("")
        loaders = {"where": "job", "transform_at": transform_at}
        there = run_job(recipe, Topology(dp=2), steps=STEPS, loaders=loaders)
        assert {line.split()[0] for line in log.read_text().splitlines()} == expected
        for one, other in zip(here, there, strict=True):
            assert same_microbatches(one.microbatches, other.microbatches) and one.digests == other.digests


def test_a_wrong_source_and_a_missing_profile_are_named(tmp_path: Path) -> None:
    recipe = write_scaled_job(tmp_path, least=1, most=4, module="placed_map_of_none", sleep_s=0)
    with pytest.raises(OptionError, match=r"loaders\.transform_at\.sloe: .* \(did you mean 'slow'\?\)"):
        run_job(recipe, Topology(), steps=1, loaders={"where": "job", "transform_at": {"sloe": "worker"}})
    (tmp_path / "catalog" / "profile.json").unlink()
    with pytest.raises(CatalogMissing, match="run torchmix profile"):
        run_job(recipe, Topology(), steps=1, loaders={"where": "job", "transform_at": "auto"})
