"""What init writes of Megatron's flags of fill in the middle: rates, tokens by name or by id, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fake_megatron import default_args
from tests.support.indexed_datasets import write_dataset
from tests.support.vocabularies import make_tokenizer
from torchmix.cli.main import main
from torchmix.errors import RecipeError
from torchmix.indexing.scan import index_recipe
from torchmix.megatron_adapter.flags import check_refusals
from torchmix.recipe.load import load_recipe
from torchmix.recipe.structs import Fim, Recipe

BLEND = ["init", "--data-path", "1", "code", "1", "talk", "--seq-length", "16", "--global-batch-size", "4"]
NAMES = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<|endoftext|>", "<file_sep>")
IDS = ["--fim-prefix-token", "11", "--fim-middle-token", "12", "--fim-suffix-token", "13", "--fim-eod-token", "9"]


@pytest.fixture(autouse=True)
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("code", "talk"):
        write_dataset(tmp_path / name, [[1, 2, 3, 9, 4, 5, 9] for _ in range(30)])


def init(*words: str) -> Recipe:
    assert main([*BLEND, "--fim-data", *words, "--force"]) == 0
    return load_recipe("recipe.yaml")


def fims(recipe: Recipe) -> list[Fim | None]:
    return [source.fim for _, source in sorted(recipe.sources.items())]


def test_ids_come_from_flags_or_from_a_vocabulary_and_rates_are_those_of_megatron() -> None:
    plain = Fim(rate=0.5, spm=0.5, ids=(11, 12, 13), eod=9)
    assert fims(init(*IDS)) == [plain, plain]
    index_recipe(load_recipe("recipe.yaml"), Path())
    make_tokenizer(Path("model/tokenizer.json"), specials=NAMES)
    words = ["--fim-rate", "0.9", "--fim-spm-rate", "0.25", "--fim-split-sample", "<file_sep>"]
    found = fims(init("--tokenizer", "model/tokenizer.json", *words, "--fim-fragment-rate", "0.75"))
    assert found == [Fim(rate=0.9, spm=0.25, ids=(0, 1, 2), eod=3, split=4, fragment_rate=0.75)] * 2
    assert fims(init(*IDS[:-2], "--eod-id", "7"))[0] == Fim(rate=0.5, spm=0.5, ids=(11, 12, 13), eod=7)
    assert "reset_id" not in Path("recipe.yaml").read_text(encoding="utf-8")


def test_the_adapter_takes_what_init_wrote() -> None:
    recipe = init(*IDS, "--fim-rate", "0.9")
    flags = {"fim_data": True, "fim_spm_rate": 0.5, "fim_split_sample": None, "fim_no_prefix": None}
    check_refusals(default_args(**flags, fim_rate=0.9), recipe, cp=1, pp=1)
    with pytest.raises(RecipeError, match=r"--fim-rate 0.5: the recipe says sources.code.fim.rate: 0.9"):
        check_refusals(default_args(**flags, fim_rate=0.5), recipe, cp=1, pp=1)


def test_without_the_switch_the_other_flags_mean_nothing_as_with_megatron() -> None:
    assert main([*BLEND, "--fim-rate", "0.9", "--fim-no-prefix", "#"]) == 0
    assert fims(load_recipe("recipe.yaml")) == [None, None]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--fim-prefix-token <fim_prefix>: a .bin holds ids, so the recipe needs the token's; give the vocabulary"),
        (IDS[:-2], "--fim-eod-token <|endoftext|>: a .bin holds ids"),
        (["--tokenizer", "tiny.json"], "--fim-prefix-token <fim_prefix>: --tokenizer tiny.json: the tokenizer has no"),
        ([*IDS, "--fim-rate", "0"], "--fim-rate 0: it is above 0 and at most 1"),
        ([*IDS, "--fim-spm-rate", "1.5"], "--fim-spm-rate 1.5: it is above 0"),
        ([*IDS, "--fim-split-sample", "5"], "--fim-split-sample needs --fim-fragment-rate"),
        ([*IDS, "--fim-no-prefix", "#!"], "--fim-no-prefix: it looks at the text that ids become"),
    ],
)
def test_what_megatron_or_torchmix_refuses_is_said(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tokenizer(Path("tiny.json"))
    assert main([*BLEND, "--fim-data", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split()) and not Path("recipe.yaml").exists()
