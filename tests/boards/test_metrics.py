"""The figures of a loader, flat and as Prometheus reads them."""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

import pytest

from tests.support.loaders import write_job
from torchmix.boards.board import flat_stats, prometheus_text
from torchmix.parallel.topology import Topology
from torchmix.stateful.open import build_loader

LINE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{((?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (\S+)')


def read_back(text: str) -> dict[tuple[str, str], float]:
    """What a scraper makes of the text: every line is a number, or the type of the one behind it, said once."""
    assert text.endswith("\n")
    numbers: dict[tuple[str, str], float] = {}
    types: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            _, word, name, kind = line.split(" ")
            assert word == "TYPE" and name not in types and kind in ("gauge", "counter")
            types[name] = kind
            continue
        match = LINE.fullmatch(line)
        assert match is not None, line
        assert [*types][-1] == match[1]
        assert (types[match[1]] == "counter") == match[1].endswith("_total")
        key = (match[1], match[2] or "")
        assert key not in numbers
        numbers[key] = float(match[3])
    return numbers


def test_every_figure_of_a_loader_is_there(tmp_path: Path) -> None:
    with build_loader(write_job(tmp_path), topology=Topology(), loaders="in_process") as loader:
        list(islice(loader, loader.num_microbatches))
        stats = loader.stats()
    flat = flat_stats(stats)
    of_sources = stats["tokens_of_source"]
    mappings = [value for value in stats.values() if isinstance(value, dict)]
    assert of_sources in mappings and len(flat) == len(stats) + sum(len(each) - 1 for each in mappings)
    assert flat["torchmix/fill"] == stats["fill"]
    for name, tokens in of_sources.items():
        assert flat[f"torchmix/tokens_of_source/{name}"] == tokens
    found = read_back(prometheus_text(stats, {"rank": 3}))
    assert sorted(found.values()) == sorted(map(float, flat.values()))
    assert found["torchmix_data_wait_seconds", 'rank="3"'] == stats["data_wait_s"]
    assert found["torchmix_data_wait_seconds_total", 'rank="3"'] == stats["total_data_wait_s"]
    assert found["torchmix_bytes_read_total", 'rank="3"'] == stats["bytes_read"]
    assert found["torchmix_cache_bytes", 'rank="3"'] == stats["cache_bytes"]
    name = min(of_sources)
    assert found["torchmix_tokens", f'rank="3",source="{name}"'] == of_sources[name]


def test_names_of_sources_may_have_any_character() -> None:
    text = prometheus_text({"tokens_of_source": {'a"b\\c': 1, "d\ne": 2.5}})
    assert read_back(text) == {
        ("torchmix_tokens", r'source="a\"b\\c"'): 1.0,
        ("torchmix_tokens", r'source="d\ne"'): 2.5,
    }


def test_before_the_first_step_there_is_little_and_it_is_valid() -> None:
    assert read_back(prometheus_text({"data_wait_s": 0.0})) == {("torchmix_data_wait_seconds", ""): 0.0}
    assert prometheus_text({}) == "" and flat_stats({}) == {}


def test_labels_that_prometheus_does_not_take_are_refused() -> None:
    for label in ("1rank", "a-b", ""):
        with pytest.raises(ValueError, match="Prometheus takes letters"):
            prometheus_text({"fill": 1.0}, {label: "x"})
