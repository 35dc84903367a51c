from __future__ import annotations

from torchmix.catalog.manifest import FileEntry
from torchmix.indexing.file_changes import FoundFile, match_files


def entry(path: str, num_bytes: int = 10, footer_hash: str = "a") -> FileEntry:
    return FileEntry(
        path=path,
        num_bytes=num_bytes,
        footer_hash=footer_hash,
        first_row=0,
        num_rows=1,
        num_pages=1,
        split_pages=0,
        whole_chunks=False,
        tail_bytes=0,
        schema=0,
        ids=None,
    )


def found(path: str, num_bytes: int = 10, footer_hash: str = "a") -> FoundFile:
    return FoundFile(path=path, num_bytes=num_bytes, footer_hash=footer_hash)


def matched(files: list[FoundFile], entries: list[FileEntry]) -> tuple[list[tuple[str, int | None]], list[str]]:
    wanted, changes = match_files("web", files, entries)
    assert all(change.source == "web" for change in changes)
    order = [(file.found.path, file.entry) for file in wanted]
    return order, [f"{change.change} {change.path}" for change in changes]


def test_without_a_catalog_all_files_are_new_in_the_order_found():
    assert matched([found("a"), found("b")], []) == ([("a", None), ("b", None)], ["added a", "added b"])


def test_known_files_keep_their_order_and_new_ones_come_after_them():
    order, changes = matched([found("a"), found("b"), found("c")], [entry("b"), entry("c")])
    assert order == [("b", 0), ("c", 1), ("a", None)]
    assert changes == ["added a"]


def test_a_file_of_another_size_or_footer_keeps_its_place_and_is_scanned():
    files = [found("a", num_bytes=11), found("b"), found("c", footer_hash="z")]
    order, changes = matched(files, [entry("a"), entry("b"), entry("c")])
    assert order == [("a", None), ("b", 1), ("c", None)]
    assert changes == ["changed a", "changed c"]


def test_a_removed_file_is_reported_and_the_others_close_up():
    order, changes = matched([found("a"), found("c")], [entry("a"), entry("b", footer_hash="b"), entry("c")])
    assert order == [("a", 0), ("c", 2)]
    assert changes == ["removed b"]


def test_a_moved_folder_keeps_every_row_in_place():
    entries = [entry("old/b", 1), entry("old/a", 2)]
    order, changes = matched([found("new/a", 2), found("new/b", 1)], entries)
    assert order == [("new/b", 0), ("new/a", 1)]
    assert changes == ["moved new/b", "moved new/a"]


def test_another_name_or_another_footer_is_not_a_move():
    order, changes = matched([found("new/a", footer_hash="z"), found("new/c")], [entry("old/a"), entry("old/b")])
    assert order == [("new/a", None), ("new/c", None)]
    assert changes == ["added new/a", "added new/c", "removed old/a", "removed old/b"]


def test_a_copy_of_a_known_file_is_new_and_takes_the_place_of_one_file_at_most():
    order, changes = matched([found("x/a"), found("y/a")], [entry("x/a")])
    assert (order, changes) == ([("x/a", 0), ("y/a", None)], ["added y/a"])
    order, changes = matched([found("x/a")], [entry("u/a"), entry("v/a")])
    assert (order, changes) == ([("x/a", 0)], ["moved x/a", "removed v/a"])
    order, changes = matched([found("x/a")], [entry("u/a"), entry("x/a")])
    assert (order, changes) == ([("x/a", 1)], ["removed u/a"])
