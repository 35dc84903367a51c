from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.support.catalog_hosts import ADDRESS, Hosts, Killed, Request, emptied_store, with_sources
from tests.support.catalogs import make_source, make_world
from tests.support.files import random_tokens
from tests.support.image_sources import make_rows, write_source
from torchmix.catalog import in_store, publish
from torchmix.catalog.in_store import PUBLISHED, address_of, bring, catalog_folder, fetch_catalog, refresh
from torchmix.catalog.manifest import read_manifest
from torchmix.catalog.settings import settings_of
from torchmix.catalog.store import open_catalog
from torchmix.errors import CatalogConflict, CatalogError, CatalogMissing, OptionError, RecipeError, SourceUnreadable
from torchmix.indexing.scan import update_catalog
from torchmix.indexing.source_work import Shard, scan_shard
from torchmix.pages import open_pages
from torchmix.reader.items import item_columns
from torchmix.recipe.checks import check_catalog_folder
from torchmix.recipe.load import check_recipe
from torchmix.storage import store_file

NAMES = ("a", "b", "c")


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Three sources, with a file of arrays each."""
    monkeypatch.setattr(publish, "SMALL_BYTES", 0)
    world = make_world(tmp_path / "job", {name: [random_tokens(ord(name), 60)] for name in NAMES})
    with emptied_store():
        yield Hosts(tmp_path, monkeypatch, world)


def arrays_of(hosts: Hosts, *names: str) -> list[str]:
    """The objects with the arrays of sources, by what the copy of the host has as its manifest."""
    sources = read_manifest(hosts.copy()).sources
    return sorted(f"arrays/{sources[name].file}" for name in names)


def assert_whole(hosts: Hosts, *names: str) -> None:
    """A loader on the host finds every document of the sources."""
    found = hosts.open(with_sources(hosts.recipe, *names))
    for name, source in found.sources.items():
        np.testing.assert_array_equal(source.sizes.tokens, [len(one) for one in hosts.world.documents[name]])


def add_file(hosts: Hosts, name: str) -> None:
    """Give a source one more file."""
    more = make_source(hosts.world.directory / "more", name, [random_tokens(7, 30)])
    number = len(list((hosts.world.directory / name).iterdir()))
    (hosts.world.directory / "more" / name / "0.parquet").rename(hosts.world.directory / name / f"{number}.parquet")
    hosts.world.documents[name] += more


def test_a_host_copies_what_its_recipe_needs_once_and_maps_it(hosts) -> None:
    near = hosts.world.index()
    hosts.index()
    assert Counter(hosts.names("put")) == Counter(hosts.objects())  # each object was written once
    hosts.at("second")
    far = hosts.open()
    assert far.fingerprint == near.fingerprint
    for name in NAMES:
        np.testing.assert_array_equal(far.sources[name].sizes.tokens, near.sources[name].sizes.tokens)
    hosts.at("third")
    one = hosts.open(with_sources(hosts.recipe, "b"))
    assert hosts.names("list") == [""]
    assert sorted(hosts.names("get")) == sorted([*arrays_of(hosts, "b"), hosts.objects("published")[0]])
    assert str(one.directory).startswith(str(hosts.folder / "hosts" / "third"))
    hosts.at("third")
    hosts.open(with_sources(hosts.recipe, "b"))
    assert hosts.asked == [Request("list", "")]
    hosts.open()
    assert sorted(hosts.names("get")) == arrays_of(hosts, "a", "c")


def test_an_index_run_sends_what_has_changed_and_a_host_gets_no_more(hosts) -> None:
    hosts.index()
    hosts.at("reader").open()
    hosts.at("first")
    hosts.index()
    assert not hosts.names("put")
    add_file(hosts, "b")
    hosts.index()
    published = hosts.objects("published")[-1]
    assert hosts.names("put") == [*arrays_of(hosts, "b"), published]
    assert not hosts.names("get")  # its copy has what it compares with
    assert_whole(hosts.at("reader"), *NAMES)
    assert sorted(hosts.names("get")) == sorted([*arrays_of(hosts, "b"), published])


def test_another_machine_continues_where_the_first_has_stopped(hosts) -> None:
    hosts.index()
    add_file(hosts, "c")
    hosts.at("other")
    report = hosts.index()
    assert (report.scanned_files, report.kept_files) == (1, 3)
    assert_whole(hosts.at("reader"), *NAMES)


def published_files(hosts: Hosts) -> set[str]:
    """All that the last two publications name, and these themselves."""
    names = hosts.objects("published")
    return {*names, *(file for name in names for file in in_store._decode(hosts.content(name)).files)}


def test_a_writer_may_be_killed_at_any_request(hosts, monkeypatch) -> None:
    monkeypatch.setattr(in_store, "LEFT_S", -1.0)  # what nothing names goes at once
    hosts.index()
    for at in range(100):
        num_before = len(hosts.world.documents["a"])
        add_file(hosts, "a")

        def kill(_: Request, at: int = at) -> None:
            if len(hosts.asked) == at:
                raise Killed

        hosts.at("writer").before = kill
        try:
            hosts.index()
            is_killed = False
        except Killed:
            is_killed = True
        hosts.before = lambda request: None
        found = hosts.at("reader").open()
        for name, source in found.sources.items():
            lengths = [len(one) for one in hosts.world.documents[name]]
            assert len(source.sizes.tokens) in (len(lengths), num_before)
            np.testing.assert_array_equal(source.sizes.tokens, lengths[: len(source.sizes.tokens)])
        hosts.at("next").index()
        assert_whole(hosts.at("reader"), *NAMES)
        if not is_killed:
            break
    assert at > 5
    for _ in range(2):  # what was killed has left goes
        add_file(hosts, "b")
        hosts.at("next").index()
    assert len(hosts.objects("published")) == 2 and set(hosts.objects()) == published_files(hosts)
    local = {str(path.relative_to(hosts.copy())) for path in (hosts.copy() / "arrays").iterdir()}
    assert local <= published_files(hosts)


@pytest.mark.parametrize("moment", ["before it looks", "before objects", "before the name", "after the name"])
def test_of_two_writers_the_second_reads_again_and_loses_nothing(hosts, moment, caplog) -> None:
    hosts.index(with_sources(hosts.recipe, "c"))
    first, second = with_sources(hosts.recipe, "a"), with_sources(hosts.recipe, "b")

    def other(request: Request) -> None:
        is_name = request.verb == "put" and PUBLISHED.fullmatch(request.name)
        is_object = request.verb == "put" and request.name.startswith("arrays")
        is_after = request == Request("list", "published")
        is_look = request == Request("list", "") and hosts.names("list") == ["", ""]  # the last one before it writes
        moments = {
            "before it looks": is_look,
            "before objects": is_object,
            "before the name": is_name,
            "after the name": is_after,
        }
        if moments[moment]:
            hosts.before = lambda request: None
            asked = list(hosts.asked)
            hosts.at("second").index(second)
            hosts.at("first").asked.extend(asked)

    hosts.at("first").before = other
    with caplog.at_level(logging.WARNING):
        report = hosts.index(first)
    assert f"the catalog at {ADDRESS} was published by another process meanwhile; it is read again" in caplog.text
    # The scan of the first attempt is used; or the other writer has built on its manifest.
    assert (report.scanned_files, report.resumed_files + report.kept_files) == (0, 1)
    assert_whole(hosts.at("reader"), *NAMES)
    assert len(hosts.objects("published")) == len({name.split(".")[0] for name in hosts.objects("published")})


def test_two_writers_that_put_the_same_number_both_take_it_back(hosts, monkeypatch) -> None:
    hosts.index(with_sources(hosts.recipe, "c"))
    met, is_first_done, failed = threading.Barrier(2), threading.Event(), []
    folders = {name: (hosts.at(name), hosts.copy())[1] for name in ("x", "y")}
    tries = Counter[str]()

    def meet(request: Request) -> None:
        name = threading.current_thread().name
        tries[name] += request == Request("list", "published")
        is_first_put = not tries[name] and request.verb == "put" and PUBLISHED.fullmatch(request.name)
        if is_first_put or (tries[name] == 1 and request == Request("list", "published")):
            met.wait(timeout=60)  # both have looked before one puts, and both have put before one looks again
        if request.verb == "delete" and name == "y":
            is_first_done.wait(timeout=60)  # so that they do not meet again

    def write(name: str, source: str) -> None:
        try:
            recipe = with_sources(hosts.recipe, source)
            update_catalog(folders[name], settings_of(recipe.sources, recipe.shuffle), hosts.world.directory)
        except BaseException as error:
            failed.append(error)
        finally:
            if name == "x":
                is_first_done.set()

    hosts.before = meet
    threads = [threading.Thread(target=write, args=one, name=one[0]) for one in (("x", "a"), ("y", "b"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and tries == Counter(x=2, y=1)  # the first has built on what the second had put
    assert_whole(hosts.at("reader"), *NAMES)


def test_a_writer_that_is_overtaken_again_and_again_says_so(hosts) -> None:
    hosts.index(with_sources(hosts.recipe, "c"))

    def other(request: Request) -> None:
        if request.verb == "put" and PUBLISHED.fullmatch(request.name):
            hosts.before, kept = (lambda request: None), hosts.before
            add_file(hosts, "c")
            hosts.at("second").index(with_sources(hosts.recipe, "c"))
            hosts.at("first").before = kept

    hosts.before = other
    with pytest.raises(CatalogConflict, match="was published by another process meanwhile"):
        hosts.index(with_sources(hosts.recipe, "a"))
    assert_whole(hosts.at("reader"), "c")


def test_a_reader_whose_objects_are_gone_reads_what_is_published_now(hosts, monkeypatch) -> None:
    monkeypatch.setattr(in_store, "LEFT_S", -1.0)
    hosts.index()
    hosts.at("reader")
    folder = fetch_catalog(hosts.world.directory, ADDRESS)
    hosts.at("first")
    for _ in range(3):
        add_file(hosts, "a")
        hosts.index()
    found = open_catalog(folder, settings_of(hosts.recipe.sources, hosts.recipe.shuffle))
    assert found.sources["a"].num_documents == 60 + 3 * 30


@pytest.mark.parametrize(
    ("alter", "says"),
    [
        (lambda content: content[:-1], "was altered since it was published, it has .* bytes and not"),
        (lambda content: bytes([content[0] ^ 1]) + content[1:], "was altered .*, it has the hash .* and not"),
        (None, "was deleted; run torchmix index to build it again"),
    ],
)
def test_an_object_that_is_not_what_was_published_is_named_and_not_used(hosts, alter, says) -> None:
    hosts.index()
    [name] = arrays_of(hosts, "b")
    if alter is None:
        hosts.store.rm(f"{ADDRESS}/{name}")
    else:
        hosts.alter(name, alter(hosts.content(name)))
    hosts.at("reader")
    with pytest.raises(CatalogError, match=f"{ADDRESS}/{name} {says}"):
        hosts.open()
    assert not (hosts.copy() / name).exists() and not (hosts.copy() / in_store.COMING_FOLDER).exists()
    assert_whole(hosts, "a", "c")
    hosts.at("other").index()  # what was damaged is scanned again
    assert_whole(hosts.at("reader"), *NAMES)


def test_what_the_store_has_lost_is_put_again_from_a_copy(hosts) -> None:
    hosts.index()
    [name] = arrays_of(hosts, "b")
    content = hosts.content(name)
    hosts.alter(name, content[:100])
    hosts.at("first").index()
    assert hosts.names("put") == [name] and hosts.content(name) == content


def test_a_manifest_that_was_altered_is_named_and_published_anew(hosts, caplog) -> None:
    hosts.index()
    [name] = hosts.objects("published")
    hosts.alter(name, hosts.content(name).replace(b"parquet", b"Parquet"))
    with pytest.raises(CatalogError, match=f"{ADDRESS}/{name} was altered: its name has the hash of its content"):
        hosts.at("reader").open()
    hosts.at("other").index()
    assert "it is built again" in caplog.text
    assert_whole(hosts.at("reader"), *NAMES)


@pytest.mark.parametrize("name", ["arrays/../../../out.12345678", "history/out.12345678", "/tmp/out.arrow"])
def test_a_name_that_leads_out_of_the_copy_is_refused(hosts, name) -> None:
    hosts.index()
    [present] = hosts.objects("published")
    found = in_store._decode(hosts.content(present))
    content = msgspec.json.encode(msgspec.structs.replace(found, files={**found.files, name: (1, "0")}))
    hosts.alter(f"published/000000002.{in_store._hash(content)[:16]}.json", content)
    with pytest.raises(CatalogError, match="is of another version of torchmix"):
        hosts.at("reader").open()


def test_a_full_disk_is_named_with_what_to_do(hosts, monkeypatch) -> None:
    hosts.index()
    hosts.at("reader")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(CatalogError, match=r"cannot be copied to this host: .*No space left.*TORCHMIX_CACHE"):
            hosts.open()
    assert not (hosts.copy() / "arrays").exists() and not (hosts.copy() / in_store.COMING_FOLDER).exists()
    assert_whole(hosts, *NAMES)


def test_a_store_that_fails_for_a_while_is_asked_again(hosts, monkeypatch, caplog) -> None:
    monkeypatch.setattr(store_file, "STORE_WAITS_S", (0.0, 0.0))
    failed = Counter[tuple[str, str]]()  # of each object

    def failing(name: str, call):
        def ask(*words, **more):
            failed[name, words[0]] += 1
            if failed[name, words[0]] % 3:
                raise OSError("http 503: slow down")
            return call(*words, **more)

        return ask

    for name in ("cat_file", "find", "open"):
        monkeypatch.setattr(hosts.store, name, failing(name, getattr(hosts.store, name)), raising=False)
    hosts.index()
    assert_whole(hosts.at("reader"), *NAMES)
    assert "trying again" in caplog.text and min(failed.values()) >= 3


def test_a_store_that_fails_for_good_is_no_reason_to_scan_again(hosts, monkeypatch, caplog) -> None:
    monkeypatch.setattr(store_file, "STORE_WAITS_S", ())
    hosts.index()
    read = hosts.store.cat_file

    def failing(path: str, **more: object) -> bytes:
        if "/arrays/" in path:
            raise OSError("http 503: slow down")
        return bytes(read(path, **more))

    monkeypatch.setattr(hosts.store, "cat_file", failing, raising=False)
    hosts.at("other")
    with pytest.raises(SourceUnreadable, match="slow down; check the store"):
        hosts.index()
    assert not hosts.names("put") and "is scanned" not in caplog.text


def test_who_may_not_write_reads_and_an_index_run_keeps_its_scans(hosts, monkeypatch) -> None:
    hosts.index()
    add_file(hosts, "a")

    def refused(*_: object, **__: object) -> None:
        raise PermissionError("AWS Error ACCESS_DENIED")

    hosts.at("guest")
    with monkeypatch.context() as patch:
        patch.setattr(hosts.store, "open", refused, raising=False)
        assert hosts.open(with_sources(hosts.recipe, "b", "c")).sources
        with pytest.raises(SourceUnreadable, match=r"cannot write .*the store refuses these credentials"):
            hosts.index()
        assert hosts.open().sources["a"].num_documents == 60
    report = hosts.index()
    assert (report.scanned_files, report.resumed_files) == (0, 1)


def test_ranks_of_a_host_that_start_together_copy_once(hosts) -> None:
    hosts.index()
    hosts.at("reader")
    start, found = threading.Barrier(4), []

    def rank() -> None:
        start.wait(timeout=60)
        found.append(hosts.open().fingerprint)

    threads = [threading.Thread(target=rank) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len(set(found)) == 1
    assert Counter(hosts.names("get")) == dict.fromkeys(hosts.objects(), 1)


def test_a_clock_that_was_set_and_one_of_another_host_hide_nothing_that_is_published(hosts, monkeypatch) -> None:
    """Hosts may share the folder of copies, as below a home on a shared disk."""
    hosts.index()
    real = time.time_ns
    for hours in (0, 30, -30, 1, 0, -1, -1, 30):
        monkeypatch.setattr(time, "time_ns", lambda hours=hours: real() + hours * 3600 * 10**9)
        hosts.asked.clear()
        hosts.open()
        assert hosts.names("list") == [""], "what is published is asked for, whatever the last one has left"


def test_a_catalog_that_is_missing_is_not_built_by_a_loader(hosts) -> None:
    with pytest.raises(CatalogMissing, match=f"there is no catalog at {ADDRESS}; run torchmix index"):
        hosts.open()
    assert not hosts.objects()
    hosts.index(with_sources(hosts.recipe, "a"))
    with pytest.raises(CatalogMissing, match=f"the catalog at {ADDRESS} lacks source 'b'"):
        hosts.open(with_sources(hosts.recipe, "a", "b"))


def test_columns_of_images_are_copied_where_they_are_read(hosts) -> None:
    said = write_source(hosts.world.directory, "seen", "parquet", [make_rows(1, 6)], "dynamic")
    plain = {"version": 1, "seed": 1, "batch": {"samples": 2, "length": 512}, "catalog": ADDRESS}
    recipe = check_recipe(plain | {"sources": {"seen": said}, "mixture": {"seen": "100%"}})
    hosts.index(recipe)
    hosts.at("second").open(recipe)
    assert not [name for name in hosts.names("get") if name.startswith("arrays/.seen")]  # a plan needs none
    [column] = item_columns(hosts.open(recipe)).sources.values()
    assert column.sizes.num_documents == 6
    assert len([name for name in hosts.names("get") if name.startswith("arrays/.seen")]) == 1


def test_a_catalog_that_was_deleted_and_built_again_is_taken_as_it_is(hosts) -> None:
    hosts.index()
    add_file(hosts, "a")
    hosts.index()
    hosts.at("reader").open()
    hosts.store.rm("memory://bucket/run", recursive=True)
    with pytest.raises(CatalogMissing):
        hosts.open()
    hosts.at("other").index()
    assert [name[:20] for name in hosts.objects("published")] == ["published/000000001."]
    assert_whole(hosts.at("reader"), *NAMES)


def test_a_folder_of_its_own_asks_no_store(hosts, tmp_path) -> None:
    folder = tmp_path / "job" / "catalog"
    hosts.world.index()
    refresh(folder)
    bring(folder, ["arrays/none"])
    assert not in_store.put_file(folder, "profile.json", b"") and not hosts.asked
    assert catalog_folder(tmp_path / "job", "catalog") == fetch_catalog(tmp_path / "job", "catalog") == folder


@pytest.mark.parametrize(
    ("catalog", "says"),
    [
        ("s3://bucket", "is a whole bucket; name a folder in it, as s3://bucket/catalog"),
        ("s3:/bucket/catalog", "would be a folder of this machine; write s3://bucket/catalog"),
        ("s3:///catalog", "names no bucket; write s3://BUCKET/catalog"),
        ("hf://datasets/me/runs/catalog", "each object of a catalog would be a commit there"),
        ("file:///data/catalog", "write the path of a folder as it is"),
    ],
)
def test_what_can_hold_no_catalog_is_told(catalog, says) -> None:
    with pytest.raises(RecipeError, match=says):
        check_catalog_folder(catalog)


def test_a_store_without_buckets_may_begin_at_its_root() -> None:
    assert check_catalog_folder("local:///data/catalog") == "local:///data/catalog"


def test_what_needs_a_folder_is_refused(hosts) -> None:
    folder = catalog_folder(hosts.world.directory, ADDRESS)
    settings = settings_of(hosts.recipe.sources, hosts.recipe.shuffle)
    with pytest.raises(OptionError, match="shards meet in a folder that all machines see"):
        scan_shard(folder, settings, hosts.world.directory, Shard(1, 2))
    with pytest.raises(OptionError, match="leave --keep-tokens out"):
        hosts.index(keep_tokens=True)
    with pytest.raises(OptionError, match="lies in a store; name a folder of this machine"):
        open_pages(str(hosts.world.directory / "a/0.parquet"), tokens="input_ids", catalog=ADDRESS)


def test_a_cache_that_cannot_be_made_is_told(hosts, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv(in_store.CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(CatalogError, match=f"cannot be copied to this host: .*{in_store.CACHE_VARIABLE}"):
        hosts.open()


def test_nothing_else_joins_a_folder_to_the_address() -> None:
    root = Path(in_store.__file__).parent.parent
    joined = ("/ recipe.catalog", "/ whole.catalog")
    assert not [path for path in root.rglob("*.py") if any(text in path.read_text() for text in joined)]


def test_a_folder_that_may_not_be_read_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(CatalogError, match=r"cannot be read: Permission denied; make it readable") as caught:
        address_of(tmp_path)
    assert "delete" not in str(caught.value)
