"""A process keeps its last warnings, however many and however long they are."""

from __future__ import annotations

import logging

import pytest

from torchmix.service.main import MOST_CHARACTERS, MOST_LINES, LastWords


@pytest.fixture
def logger() -> logging.Logger:
    return logging.Logger("torchmix.test")


def test_warnings_are_kept_with_time_and_level_and_news_are_not(logger: logging.Logger) -> None:
    words = LastWords()
    logger.addHandler(words)
    logger.info("all is well")
    logger.warning("page %d is damaged", 7)
    [line] = words.lines()
    assert line.endswith(" WARNING page 7 is damaged") and line[2] == line[5] == ":"


def test_only_the_last_lines_are_kept_and_each_is_cut(logger: logging.Logger) -> None:
    words = LastWords()
    logger.addHandler(words)
    for number in range(MOST_LINES + 3):
        logger.error("%d %s\nmore", number, "x" * 1000)
    lines = words.lines()
    assert [line.split()[2] for line in lines] == [str(number) for number in range(3, MOST_LINES + 3)]
    assert {len(line) for line in lines} == {MOST_CHARACTERS}


def test_what_goes_wrong_is_one_line_without_its_traceback(logger: logging.Logger) -> None:
    words = LastWords()
    logger.addHandler(words)
    try:
        raise OSError("input/output error")
    except OSError:
        logger.exception("a file cannot be read")
    assert [line.split(" ", 2)[2] for line in words.lines()] == ["a file cannot be read"]
