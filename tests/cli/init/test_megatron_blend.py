from __future__ import annotations

import random
from fractions import Fraction

import pytest

from tests.support.indexed_datasets import random_sequences, write_dataset
from torchmix.cli.init.megatron_blend import (
    Blend,
    parse_blend,
    samples_of_one_pass,
    share_texts,
    words_of,
    words_of_file,
    words_of_split_file,
)
from torchmix.errors import OptionError, SourceUnreadable
from torchmix.recipe.amounts import parse_fraction


def blend(*prefixes: str, weights: list[str] | None = None) -> Blend:
    return Blend(prefixes=prefixes, weights=None if weights is None else tuple(Fraction(weight) for weight in weights))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["/p/web"], blend("/p/web")),
        (["0.3", "/p/web", "0.7", "/p/code"], blend("/p/web", "/p/code", weights=["3/10", "7/10"])),
        (["1e-3", " /p/web ", "+.5", "/p/code"], blend("/p/web", "/p/code", weights=["1/1000", "1/2"])),
        (["/p/web", "/p/code"], blend("/p/web", "/p/code")),
        (["/p/a", "/p/b", "/p/c"], blend("/p/a", "/p/b", "/p/c")),
        (["30", "/p/web"], blend("/p/web", weights=["30"])),
        (["1", "/p/web", "2", "/p/web"], blend("/p/web", "/p/web", weights=["1", "2"])),
    ],
)
def test_words_mean_what_they_mean_to_megatron(words, expected):
    assert parse_blend(words, "--data-path") == expected


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "names no dataset"),
        (["0.3", "/p/web", "/p/code"], "3 words, some of them numbers"),
        (["0.3", "/p/web", "/p/code", "/p/more"], "'/p/code' stands where a weight should"),
        (["0", "/p/web", "0.0", "/p/code"], "the weight 0 of /p/web must be above 0"),
        (["1", "/p/web", "-0.5", "/p/code"], "the weight -0.5 of /p/code must be above 0"),
        (["-1", "/p/web"], "the weight -1 of /p/web must be above 0"),
        (["inf", "/p/web"], "the weight inf"),
        (["nan", "/p/web"], "the weight nan"),
    ],
)
def test_what_megatron_refuses_is_refused(words, says):
    with pytest.raises(OptionError, match=f"--data-path.*{says}"):
        parse_blend(words, "--data-path")


@pytest.mark.parametrize(
    ("weights", "texts"),
    [
        (["3/10", "7/10"], ["30%", "70%"]),
        (["30", "70"], ["30%", "70%"]),
        (["1"], ["100%"]),
        (["1", "1", "1"], ["33.333333333333334%", "33.333333333333333%", "33.333333333333333%"]),
        (["1/1000", "999/1000"], ["0.1%", "99.9%"]),
        (["1", "1", "6"], ["12.5%", "12.5%", "75%"]),
        (["1/1000000000000000000000", "3"], ["0.000000000000001%", "99.999999999999999%"]),
    ],
)
def test_shares_are_exact_where_decimals_end_and_sum_to_all(weights, texts):
    assert share_texts([Fraction(weight) for weight in weights]) == texts


def test_shares_of_any_weights_sum_to_one_and_are_megatrons_to_the_last_bit_of_a_double():
    draw = random.Random(1)
    for _ in range(300):
        weights = [Fraction(draw.randint(1, 10 ** draw.randint(1, 12)), 1000) for _ in range(draw.randint(1, 40))]
        shares = [parse_fraction(text, "") for text in share_texts(weights)]
        assert sum(shares) == 1
        for share, weight in zip(shares, weights, strict=True):
            assert abs(share - weight / sum(weights)) <= Fraction(1, 10**17)


def test_one_pass_has_as_many_samples_as_gpt_dataset_makes_of_it(tmp_path):
    """(tokens - 1) // seq_length: each sample ends with the first token of the next."""
    for number, tokens in enumerate([0, 1, 16, 17, 32, 33, 1000]):
        path = write_dataset(tmp_path / f"{number}", [[7] * (tokens // 2), [7] * (tokens - tokens // 2)])
        assert samples_of_one_pass(str(path), seq_length=16, documents=None) == max(0, tokens - 1) // 16
    sequences = random_sequences(1, 100)
    path = write_dataset(tmp_path / "web", sequences)
    part = sum(map(len, sequences[10:97]))
    assert samples_of_one_pass(str(path), seq_length=16, documents=("10%", "96.9%")) == (part - 1) // 16


def test_an_index_that_is_none_is_an_error(tmp_path):
    path = write_dataset(tmp_path / "web", [[1]])
    path.with_suffix(".idx").write_bytes(b"no index")
    with pytest.raises(SourceUnreadable, match=r"web\.idx: it begins with b'no index'"):
        samples_of_one_pass(str(path), seq_length=16, documents=None)


def test_words_come_quoted_or_one_by_one_or_from_a_file(tmp_path):
    assert words_of(["0.3 '/p/my web' 0.7 /p/code"]) == ["0.3", "/p/my web", "0.7", "/p/code"]
    assert words_of(["0.3", "/p/my web"]) == ["0.3", "/p/my web"]
    (tmp_path / "args").write_text("0.3 /p/web\n0.7\t/p/code\n")
    assert words_of_file(tmp_path / "args") == ["0.3", "/p/web", "0.7", "/p/code"]
    (tmp_path / "split.json").write_text('{"train": "1 /p/web", "valid": [2, "/p/a", 3, "/p/b"], "test": null}')
    assert words_of_split_file(tmp_path / "split.json") == {
        "train": ["1", "/p/web"],
        "validation": ["2", "/p/a", "3", "/p/b"],
    }


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[]", "not an object with the keys"),
        ("{", "no JSON"),
        ('{"train": "a"}', "not an object with the keys train, valid and test"),
        ('{"train": {}, "valid": null, "test": null}', "train is {}; write a list"),
    ],
)
def test_a_file_of_another_shape_is_named(tmp_path, content, says):
    (tmp_path / "split.json").write_text(content)
    with pytest.raises(OptionError, match=f"split.json.*{says}"):
        words_of_split_file(tmp_path / "split.json")
    with pytest.raises(OptionError, match=r"cannot read .*none\.json"):
        words_of_split_file(tmp_path / "none.json")


def test_prefixes_of_weight_0_are_left_out():
    """Megatron's BlendedDataset asserts that weights are above 0, in every version; 0 means: not this one."""
    found = parse_blend(["0", "/p/a", "1", "/p/b", "0.0", " /p/c ", "3", "/p/d"], "--data-path")
    assert found.prefixes == ("/p/b", "/p/d") and found.weights == (1, 3)
    assert found.left_out == ("/p/a", "/p/c")
