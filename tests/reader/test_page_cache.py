from __future__ import annotations

import random

from torchmix.reader.page_cache import PageCache


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
