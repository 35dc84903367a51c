from __future__ import annotations

import random

from tests.support.worlds import run_ranks
from torchmix.reader.page_cache import CacheRoom, PageCache


def test_what_was_used_longest_ago_goes_first():
    cache: PageCache[str, int] = PageCache(30)
    for key in "abc":
        cache.keep(key, ord(key), 10)
    assert cache.use("a") == ord("a")
    cache.keep("d", 0, 10)
    assert [key in cache for key in "abcd"] == [True, False, True, True]
    assert cache.use("b") is None
    assert cache.num_bytes == 30


def test_a_large_thing_pushes_out_as_many_as_it_needs():
    cache: PageCache[str, int] = PageCache(30)
    for key in "abc":
        cache.keep(key, 0, 10)
    cache.keep("d", 1, 15)
    assert [key in cache for key in "abcd"] == [False, False, True, True]


def test_what_is_larger_than_the_budget_is_not_kept_and_pushes_nothing_out():
    cache: PageCache[str, int] = PageCache(30)
    cache.keep("a", 1, 10)
    cache.keep("b", 1, 31)
    assert ("a" in cache, "b" in cache) == (True, False)
    cache.keep("a", 2, 31)  # now too large: the old one must not be found either
    assert cache.use("a") is None and cache.num_bytes == 0


def test_asking_whether_a_thing_is_kept_is_no_use_of_it():
    cache: PageCache[str, int] = PageCache(20)
    cache.keep("a", 0, 10)
    cache.keep("b", 0, 10)
    assert "a" in cache
    cache.keep("c", 0, 10)
    assert "a" not in cache


def test_sizes_stay_within_the_budget_and_true_over_random_calls():
    rng = random.Random(4)
    cache: PageCache[int, int] = PageCache(100)
    sizes: dict[int, int] = {}
    for _ in range(5000):
        key, size = rng.randrange(20), rng.randrange(60)
        match rng.randrange(4):
            case 0 | 1:
                roomy = cache.has_room(size) and key not in cache
                before = len(cache)
                cache.keep(key, size, size)
                sizes[key] = size
                assert not roomy or len(cache) == before + 1
            case 2:
                cache.forget(key)
                assert key not in cache
            case _:
                found = cache.use(key)
                assert found is None or found == sizes[key]
        kept = [sizes[key] for key in range(20) if key in cache]
        assert cache.num_bytes == sum(kept) <= 100 and len(cache) == len(kept)
    cache.clear()
    assert len(cache) == cache.num_bytes == 0


def test_caches_of_a_room_drop_what_any_of_them_used_longest_ago() -> None:
    room = CacheRoom()
    train: PageCache[str, int] = PageCache(30, room=room)
    valid: PageCache[str, int] = PageCache(20, room=room)
    for key in "abc":
        train.keep(key, 1, 10)
    assert not valid.has_room(10)
    train.use("a")
    valid.keep("a", 2, 10)
    assert [key in train for key in "abc"] == [True, False, True]
    valid.keep("b", 2, 10)
    assert (train.use("a"), valid.use("a"), len(train), len(valid)) == (1, 2, 1, 2)
    train.close()
    assert room.num_bytes == 20 and room.budget_bytes == 20, "what the caches that are left ask for"
    valid.keep("c", 2, 10)
    assert [key in valid for key in "abc"] == [True, False, True]


def test_the_largest_of_a_room_says_how_much_is_kept() -> None:
    room = CacheRoom()
    small: PageCache[str, int] = PageCache(10, room=room)
    large: PageCache[str, int] = PageCache(100, room=room)
    for key in "abcdefgh":
        small.keep(key, 0, 10)
    assert room.num_bytes == 80
    large.close()
    assert room.num_bytes == 10 and "h" in small


def test_threads_of_a_room_keep_its_budget() -> None:
    room = CacheRoom()
    caches: list[PageCache[int, int]] = [PageCache(1000, room=room) for _ in range(4)]

    def program(cache: PageCache[int, int]) -> int:
        draw, most = random.Random(5), 0
        for _ in range(3000):
            key = draw.randrange(40)
            cache.keep(key, key, draw.randrange(1, 90))
            assert cache.use(draw.randrange(40)) in (None, *range(40))
            with room.lock:
                most = max(most, sum(one.num_bytes for one in caches))
        return most

    assert all(0 < most <= 1000 for most in run_ranks(caches, program))
    assert room.num_bytes == sum(cache.num_bytes for cache in caches)
