"""In which files of arrays an index run keeps its sources, and for how long."""

from __future__ import annotations

from tests.support.catalogs import make_world
from tests.support.files import make_tokens_file, random_tokens
from tests.support.indexing import assert_lengths, indexed
from torchmix.catalog.array_files import SMALL_BYTES
from torchmix.catalog.manifest import read_manifest


def test_small_sources_share_a_file_of_arrays_as_long_as_one_of_them_is_as_it_was(tmp_path):
    world = make_world(tmp_path, {name: [random_tokens(seed, 30)] for seed, name in enumerate(("a", "b", "c"))})
    arrays = tmp_path / "catalog" / "arrays"

    def files() -> dict[str, str]:
        found = {name: entry.file for name, entry in read_manifest(tmp_path / "catalog").sources.items()}
        assert {path.name for path in arrays.iterdir()} >= set(found.values())
        return found

    indexed(world)
    first = files()
    assert len(set(first.values())) == 1
    make_tokens_file(tmp_path / "b" / "0.parquet", [[1, 2], [3]])
    catalog = indexed(world).catalog
    second = files()
    assert second["a"] == second["c"] == first["a"] != second["b"]
    assert catalog.sources["b"].sizes.tokens.tolist() == [2, 1]
    assert catalog.sources["c"].sizes.tokens.tolist() == [len(document) for document in world.documents["c"]]
    for name in ("a", "c"):
        make_tokens_file(tmp_path / name / "0.parquet", [[1, 2, 3], [3]])
    indexed(world)
    third = files()
    assert third["a"] == third["c"] not in set(second.values()) and third["b"] == second["b"]
    assert first["a"] in {path.name for path in arrays.iterdir()}, "jobs of the version before have it mapped"
    make_tokens_file(tmp_path / "b" / "0.parquet", [[1, 2], [3, 3]])
    indexed(world)
    assert first["a"] not in {path.name for path in arrays.iterdir()}


def test_a_large_source_has_a_file_of_its_own(tmp_path):
    long, short = [[1]] * (SMALL_BYTES // 4 + 1), [[1]] * 10
    world = make_world(tmp_path, {"long": [long], "short": [short], "tiny": [short]})
    indexed(world)
    found = {name: entry.file for name, entry in read_manifest(tmp_path / "catalog").sources.items()}
    assert found["short"] == found["tiny"] and found["long"].startswith("long.")
    assert_lengths(world)
