"""Checks: every fault is found, and named with its line and path of keys."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from tests.support.recipe_text import TEXT, edited, load_text
from torchmix.errors import RecipeError

# Each case: what is replaced in TEXT, by what, and the line, path of keys and words of the error.
FAULTS = [
    # keys
    ("max_epochs: 4", "max_epoch: 4", 13, "sources.web.max_epoch", "did you mean 'max_epochs'?"),
    ("mixture: {", "mixtures: {", 15, "mixtures", "did you mean 'mixture'?"),
    ("hidden: 4096", "hiden: 4096", 17, "balance.model.hiden", "did you mean 'hidden'?"),
    ("seed: 1234", "zzzz: 1234", 2, "zzzz", "valid here: version, seed, batch, sources"),
    ("    text: body", "    text: body\n    text: title", 9, "sources.peps.text", "twice, first in line 8"),
    ("web: 70%, ", "web: 60%, web: 10%, ", 15, "mixture.web", "twice"),
    ("seed: 1234\n", "", 0, "seed", "required and missing"),
    ("samples: 64, ", "", 3, "batch.samples", "required and missing"),
    ("catalog: ./index", "? [a, b]\n: 1", 4, "", "keys are text"),
    # types
    ("length: 1024", "length: long", 3, "batch.length", "expected a whole number, got text 'long'"),
    ("length: 1024", "length: 1024.0", 3, "batch.length", "expected a whole number, got 1024.0"),
    ("seed: 1234", "seed: true", 2, "seed", "expected a whole number, got True"),
    ("max_epochs: 4", "max_epochs: 2024-01-31", 13, "sources.web.max_epochs", "whole number or nothing"),
    ("max_epochs: 4", "max_epochs: 2024-13-45", 13, "sources.web.max_epochs", "month must be in 1..12"),
    ("data/more.parquet]", "7]", 11, "sources.web.path", "text or a list of texts"),
    ("read: {cache: 1GiB}", "read:", 19, "read", "expected a mapping with the keys cache, got nothing"),
    ("shuffle: {window_pages: 256, window_bytes: 64MiB}", "shuffle: [256]", 18, "shuffle", "got [256]"),
    ("mixture: {web: 70%, peps: 30%}", "mixture: 70%", 15, "mixture", "of name: value"),
    (
        "method: rows",
        "method: row",
        17,
        "balance.method",
        "zigzag, none (did you mean 'rows'?)",
    ),
    ("overflow: split", "overflow: splitt", 16, "packing.overflow", "did you mean 'split'?"),
    ("boundaries: document", "boundaries: no", 16, "packing.boundaries", "False is not one of document, none"),
    ("tokenizer: bytes", "tokenizer: gpt2", 9, "sources.peps.tokenizer", "'gpt2' is no tokenizer; write bytes,"),
    ("renormalise", "renormalize", 14, "sources.web.on_exhausted", "did you mean 'renormalise'?"),
    # numbers
    ("version: 1", "version: 2", 1, "version", "this torchmix reads version 1"),
    ("version: 1", "version: 0", 1, "version", "this torchmix reads version 1"),
    ("version: 1", "version: one", 1, "version", "expected a whole number"),
    ("seed: 1234", "seed: -1", 2, "seed", "-1 is out of range"),
    ("seed: 1234", f"seed: {2**63}", 2, "seed", "out of range"),
    ("samples: 64", "samples: 0", 3, "batch.samples", "at least 1"),
    ("length: 1024", "length: 1", 3, "batch.length", "at least 2"),
    ("samples: 64", f"samples: {2**21}", 3, "batch", "at most 1073741824"),
    ("max_epochs: 4", "max_epochs: 0", 13, "sources.web.max_epochs", "at least 1"),
    ("align_tokens: 8", "align_tokens: 0", 16, "packing.align_tokens", "at least 1"),
    ("align_tokens: 8", "align_tokens: 48", 16, "packing.align_tokens", "48 does not divide batch.length 1024"),
    ("layers: 32", "layers: 0", 17, "balance.model.layers", "at least 1"),
    ("kv_heads: 8", "kv_heads: 5", 17, "balance.model.kv_heads", "5 does not divide heads 32"),
    ("kv_heads: 8", "vocab: -1", 17, "balance.model.vocab", "at least 0"),
    ("seed: 1234", "seed: 1234\nvocab_size: 0", 3, "vocab_size", "in [1, 2147483648]"),
    ("seed: 1234", f"seed: 1234\nvocab_size: {2**31 + 1}", 3, "vocab_size", "in [1, 2147483648]"),
    (
        "heads: 32, kv_heads: 8}}",
        "heads: 32, vocab: 50304}}\nvocab_size: 50257",
        17,
        "balance.model.vocab",
        "50304 ids, and vocab_size is 50257",
    ),
    ("window_pages: 256", "window_pages: 0", 18, "shuffle.window_pages", "at least 1"),
    ("window_bytes: 64MiB", "window_bytes: 64 Mbit", 18, "shuffle.window_bytes", "'64 Mbit' is not a size"),
    ("cache: 1GiB", "cache: -5", 19, "read.cache", "-5 is not a size"),
    # sources
    (", model: {layers: 32, hidden: 4096, ffn: 11008, heads: 32, kv_heads: 8}", "", 17, "balance.model", "needs"),
    ("    tokens: input_ids\n", "", 10, "sources.web", "exactly one of text and tokens names the column; neither"),
    ("    text: body", "    text: body\n    tokens: ids", 6, "sources.peps", "both are given"),
    ("    tokenizer: bytes\n", "", 6, "sources.peps.tokenizer", "needs a tokenizer"),
    ("    max_epochs: 4", "    tokenizer: bytes", 13, "sources.web.tokenizer", "remove tokenizer"),
    ("text: body", 'text: ""', 8, "sources.peps.text", "name a column"),
    ("path: ../corpus/peps.parquet", 'path: ""', 7, "sources.peps.path", "name a file or a glob"),
    ("[data/web/*.parquet, data/more.parquet]", "[]", 11, "sources.web.path", "name a file or a glob"),
    ("catalog: ./index", 'catalog: ""', 4, "catalog", "name a folder"),
    # shares
    ("web: 70%", "web: 0.7", 15, "mixture.web", "write all as text"),
    ("web: 70%", "web: 70", 15, "mixture.web", "write all as text"),
    ("web: 70%", "web: '70'", 15, "mixture.web", "'70' is not a percentage"),
    ("web: 70%", "web: nan%", 15, "mixture.web", "not a percentage"),
    ("web: 70%", "web: 1e99999%", 15, "mixture.web", "not a percentage"),
    ("web: 70%", "web: [70%]", 15, "mixture.web", "expected text"),
    ("web: 70%", "web: 0%, more: 70%", 15, "mixture.more", "no such source; sources are peps, web"),
    ("web: 70%", "web: -1%", 15, "mixture.web", "below 0"),
    ("web: 70%", "web: 69.9%", 15, "mixture", "sum to 99.9%, not 100%; 0.1% is missing"),
    ("web: 70%", "web: 70.001%", 15, "mixture", "sum to 100.001%, not 100%; 0.001% is too much"),
    ("{web: 70%", "{webb: 70%", 15, "mixture.webb", "did you mean 'web'?"),
    ("{web: 70%, peps: 30%}", "{peps: 100%}", 15, "mixture.web", "the source 'web' has no share"),
    # YAML
    ("read: {cache: 1GiB}", "read: {cache: [1GiB}", 19, "", "not valid YAML"),
    ("read: {cache: 1GiB}", "---\nread: {cache: 1GiB}", 19, "", "not valid YAML"),
    ("read: {cache: 1GiB}", "read: {cache: *nowhere}", 19, "", "nowhere"),
    ("read: {cache: 1GiB}", "read: &loop {cache: *loop}", 0, "", "alias refers to itself"),
    ("read: {cache: 1GiB}", "read: !!python/object:os.system {}", 19, "read", "has no place in a recipe"),
    ("cache: 1GiB", "cache: !!python/name:os.system x", 19, "", "could not determine a constructor"),
]


def test_a_default_at_fault_has_no_line_and_is_told_to_be_one(tmp_path: Path) -> None:
    text = edited("length: 1024", "length: 100")
    text = "\n".join(line for line in text.splitlines() if not line.startswith("packing"))
    with pytest.raises(RecipeError) as caught:
        load_text(tmp_path, text)
    assert str(caught.value).startswith("packing.align_tokens: 8, the default, does not divide batch.length 100")


@pytest.mark.parametrize(("old", "new", "line", "where", "words"), FAULTS, ids=[f"{f[3]}-{f[1]}" for f in FAULTS])
def test_a_fault_is_named_with_its_line_and_path_of_keys(
    tmp_path: Path, old: str, new: str, line: int, where: str, words: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        load_text(tmp_path, edited(old, new))
    error = caught.value
    assert (error.line, error.where) == (line, where), str(error)
    assert words in error.message
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


# Keys that TEXT does not have: what is put for a key of TEXT, with its line, path of keys and words.
RAMP = "samples: [{from_step: 0, samples: 4}, {from_step: 9, samples: 8}]"
OTHER_FAULTS = [
    ("samples: 64", "samples: []", 3, "batch.samples", "is empty"),
    ("samples: 64", RAMP.replace("0", "1"), 3, "batch.samples[0].from_step", "begins at step 1, not at 0"),
    ("samples: 64", RAMP.replace("9", "0"), 3, "batch.samples[1].from_step", "0 is not after 0"),
    ("samples: 64", RAMP.replace("8", "0"), 3, "batch.samples[1].samples", "at least 1"),
    ("samples: 64", RAMP.replace("8", str(2**21)), 3, "batch", "at most 1073741824"),
    ("max_epochs: 4", "format: megatron", 12, "sources.web.tokens", "hold tokens and have no columns"),
    (
        "max_epochs: 4",
        "format: csv",
        13,
        "sources.web.format",
        "CSV is not read; DuckDB makes Parquet of it: python -c",
    ),
    ("path: ../corpus/peps.parquet", "path: a.bin", 8, "sources.peps.text", "have no columns"),
    ("max_epochs: 4", "documents: [50%, 50%]", 13, "sources.web.documents", "50% to 50% is no part"),
    ("max_epochs: 4", "documents: [-1%, 50%]", 13, "sources.web.documents", "is no part"),
    ("max_epochs: 4", "documents: [0%, 101%]", 13, "sources.web.documents", "is no part"),
    ("max_epochs: 4", "documents: [0%, half]", 13, "sources.web.documents[1]", "'half' is not a percentage"),
    ("max_epochs: 4", "documents: [0%]", 13, "sources.web.documents", "a list of 2 texts"),
    ("catalog: ./index", "split: []", 4, "split", "has 0 weights"),
    ("catalog: ./index", "split: [1, 1, 1, 1]", 4, "split", "has 4 weights"),
    ("catalog: ./index", "split: [1, -1]", 4, "split[1]", "-1 is no weight"),
    ("catalog: ./index", "split: [1, .nan]", 4, "split[1]", "nan is no weight"),
    ("catalog: ./index", "split: [1, .inf]", 4, "split[1]", "inf is no weight"),
    ("catalog: ./index", "split: [0, 1]", 4, "split[0]", "must be above 0"),
    ("catalog: ./index", "split: 969,30,1", 4, "split", "expected a list of numbers"),
    ("catalog: ./index", "per_token_loss: no", 4, "per_token_loss", "False is not one of warn, require"),
    ("catalog: ./index", "test: {sources: {}, mixture: {}}", 4, "test.sources", "names no source"),
    ("catalog: ./index", "test: {sources: {v: {path: a.bin}}, mixture: {v: 9%}}", 4, "test.mixture", "91% is missing"),
    ("catalog: ./index", "test: {sources: {v: {path: a.bin}}, mixture: {v: 0}}", 4, "test.mixture", "all shares are 0"),
    (
        "catalog: ./index",
        "test: {sources: {v: {path: a}}, mixture: {v: 100%}}",
        4,
        "test.sources.v",
        "neither is given",
    ),
    ("catalog: ./index", "test: {sources: {web: {path: a.bin}}, mixture: {web: 100%}}", 4, "test.sources.web", "train"),
    ("catalog: ./index", "tests: {}", 4, "tests", "did you mean 'test'?"),
    ("tokenizer: bytes", "tokenizer: 'tiktoken:'", 9, "sources.peps.tokenizer", "'tiktoken:' is no tokenizer; write"),
    ("tokenizer: bytes", "tokenizer: t.model", 9, "sources.peps.tokenizer", "the path of a tokenizer.json"),
    ("max_epochs: 4", "tokenizer: t.json", 13, "sources.web.tokenizer", "used as it is"),
    ("max_epochs: 4", "end_id: 0", 13, "sources.web.end_id", "used as it is; remove end_id"),
    ("tokenizer: bytes", "tokenizer: bytes\n    end_id: 1", 10, "sources.peps.end_id", "ends each document with 256"),
    ("tokenizer: bytes", "tokenizer: t.json\n    end_id: -1", 10, "sources.peps.end_id", "must be in [0, 2147483647]"),
    ("tokenizer: bytes", "tokenizer: t.json\n    end_id: ''", 10, "sources.peps.end_id", "name a token"),
    ("tokenizer: bytes", "tokenizer: t.json\n    end_id: 1.5", 10, "sources.peps.end_id", "number or text or nothing"),
    ("tokenizer: bytes", "tokenizer: t.json\n    begin_id: true", 10, "sources.peps.begin_id", "got True"),
    ("path: ../corpus/peps.parquet", "end_id: 1\n    path: a.bin", 9, "sources.peps.text", "have no columns"),
    ("window_pages: 256", "method: rows", 18, "shuffle.method", "one of page, row, none (did you mean 'row'?)"),
]


@pytest.mark.parametrize(
    ("old", "new", "line", "where", "words"), OTHER_FAULTS, ids=[f"{f[3]}-{f[1]}" for f in OTHER_FAULTS]
)
def test_a_fault_in_a_rarer_key_is_named_with_its_line(
    tmp_path: Path, old: str, new: str, line: int, where: str, words: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        load_text(tmp_path, edited(old, new))
    error = caught.value
    assert (error.line, error.where) == (line, where), str(error)
    assert words in error.message


VALIDATION = "validation: {sources: {v: {path: a.bin}}, mixture: {v: 100%}}"


def test_a_split_excludes_other_ways_to_name_parts(tmp_path: Path) -> None:
    text = TEXT + "split: [9, 1]\n"
    with pytest.raises(RecipeError, match="validation has sources of its own") as caught:
        load_text(tmp_path, text + VALIDATION)
    assert caught.value.where == "split"
    with pytest.raises(RecipeError, match="remove documents") as caught:
        load_text(tmp_path, text.replace("max_epochs: 4", "documents: [0%, 9%]"))
    assert (caught.value.where, caught.value.line) == ("sources.web.documents", 13)
    with pytest.raises(RecipeError, match="that of a source of validation"):
        load_text(tmp_path, text.replace("split: [9, 1]", VALIDATION) + VALIDATION.replace("validation", "test"))
