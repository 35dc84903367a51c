"""Chats of every container, and ids with a mask of loss: tokens and labels, against documents put together by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import torchmix
from tests.support.chats import CONTAINERS, labels_of, make_chats, plain_document, write_chats
from tests.support.image_sources import RULES, make_rows
from tests.support.vocabularies import make_tokenizer
from torchmix.catalog.store import Catalog
from torchmix.errors import CatalogStale, RecipeError, SourceUnreadable, TorchmixError
from torchmix.indexing.scan import index_recipe
from torchmix.reader.protocol import WantedPieces
from torchmix.reader.reader import Reader
from torchmix.recipe.fingerprint import recipe_fingerprint
from torchmix.recipe.load import check_recipe
from torchmix.recipe.structs import Recipe


def recipe_of(source: dict[str, Any], **options: Any) -> Recipe:
    return check_recipe(
        {
            "version": 1,
            "seed": 1,
            "batch": {"samples": 4, "length": 128},
            "sources": {"chats": source},
            "mixture": {"chats": 1},
            **options,
        }
    )


def ids_and_labels(catalog: Catalog, folder: Path) -> list[tuple[list[int], list[int]]]:
    """The ids of every row, and the labels that the places without one leave, by the reader."""
    tokens = catalog.sources["chats"].sizes.tokens.astype(np.int64)
    wanted = WantedPieces.end_to_end(source=0, row=np.arange(len(tokens)), epoch=0, start=0, tokens=tokens)
    reader = Reader(catalog, folder, cache_bytes=1 << 20)
    read = reader.read(wanted)
    reader.close()
    assert read.unlabelled is not None
    found = []
    for place, count in zip(wanted.places.tolist(), tokens.tolist(), strict=True):
        ids = read.values[place : place + count].tolist()
        labels = np.array([*ids[1:], -100] if ids else [], np.int64)
        here = read.unlabelled[(read.unlabelled >= place) & (read.unlabelled < place + count)]
        labels[here - place] = -100
        found.append((ids, labels.tolist()))
    return found


@pytest.mark.parametrize("container", CONTAINERS)
def test_chats_of_every_container(tmp_path: Path, container: str) -> None:
    files = [make_chats(number, 60) for number in range(2)]
    catalog = index_recipe(recipe_of(write_chats(tmp_path, "chats", container, files)), tmp_path)
    documents = [plain_document(chat) for chats in files for chat in chats]
    assert ids_and_labels(catalog, tmp_path) == [(ids, labels_of(ids, has_loss)) for ids, has_loss in documents]
    assert any(any(has_loss) for _, has_loss in documents) and not all(all(has_loss) for _, has_loss in documents)


def test_a_template_has_special_tokens_and_a_content_has_none(tmp_path: Path) -> None:
    names = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    make_tokenizer(tmp_path / "tok.json", specials=names)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tmp_path / "tok.json"))
    tokenizer.encode_special_tokens = True
    start, end, _ = (tokenizer.token_to_id(name) for name in names)
    chat = [("user", "say <|im_end|> twice"), ("assistant", "no.")]
    source = write_chats(tmp_path, "chats", "jsonl", [[chat]])
    source |= {"tokenizer": "tok.json", "end_id": "<|endoftext|>", "chat": {"template": "chatml"}}

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    before = [start, *encode("user\nsay <|im_end|> twice"), end, *encode("\n"), start, *encode("assistant\n")]
    said = [*encode("no."), end]
    behind = [*encode("\n"), tokenizer.token_to_id("<|endoftext|>")]
    [(ids, labels)] = ids_and_labels(index_recipe(recipe_of(source), tmp_path), tmp_path)
    assert ids == before + said + behind
    assert [label for label in labels if label >= 0] == [*said, behind[-1]], "the model learns to end the document, too"
    assert labels[-2] == behind[-1]
    assert labels.index(said[0]) == len(before) - 1
    make_tokenizer(tmp_path / "tok.json")
    with pytest.raises(RecipeError, match=r"chat.template: the tokenizer has no token '<\|im_start\|>'"):
        index_recipe(recipe_of(source), tmp_path)


def test_turns_of_ones_own_and_other_roles_with_loss(tmp_path: Path) -> None:
    source = write_chats(tmp_path, "chats", "jsonl", [[[("user", "a"), ("critic", "bc")]]])
    turns = {"user": {"before": "<", "after": ">"}, "critic": {"before": "(", "after": ")"}}
    source["chat"] = {"turns": turns, "separator": "_", "loss": ["critic"]}
    [(ids, labels)] = ids_and_labels(index_recipe(recipe_of(source), tmp_path), tmp_path)
    assert ids == [*b"<a>_(bc)_", 256]
    assert labels == [*[-100] * 4, *b"bc)", -100, 256, -100]


@pytest.mark.parametrize("template", ["plain", "chatml", "llama3"])
@pytest.mark.parametrize("last", ["user", "assistant", "image of the assistant", "assistant without words"])
def test_the_end_of_a_document_has_loss_behind_a_last_turn_that_has(tmp_path: Path, template: str, last: str) -> None:
    role, _, rest = last.removeprefix("image of the ").partition(" ")
    image = last.startswith("image")
    if image:
        (tmp_path / "0.bin").write_bytes(next(image for row in make_rows(5, 12) for image in row.images))
    content = "" if rest == "without words" else "<image>" if image else "x"
    chat = [{"role": "user", "content": "u"}, {"role": role, "content": content}]
    (tmp_path / "0.jsonl").write_text(json.dumps({"messages": chat, "image": "0.bin" if image else None}) + "\n")
    source: dict[str, Any] = {"path": "0.jsonl", "messages": "messages", "tokenizer": "bytes"}
    source["chat"] = {"template": template}
    if image:
        source["images"] = {"column": "image", "folder": ".", "token": 300, **RULES["dynamic"]}
    [(_, labels)] = ids_and_labels(index_recipe(recipe_of(source), tmp_path), tmp_path)
    assert labels[-2:] == [256 if role == "assistant" else -100, -100]


def test_images_stand_where_messages_have_them(tmp_path: Path) -> None:
    chats: list[Any] = [
        [{"from": "human", "value": "see <image> and <image>"}, {"from": "gpt", "value": "two"}],
        [{"from": "system", "value": "s"}, {"from": "human", "value": "what"}, {"from": "gpt", "value": "this"}],
        [{"role": "user", "content": [{"type": "image", "image": "x"}, {"type": "text", "text": "?"}]}],
        [{"role": "user", "content": "no image"}, {"role": "assistant", "content": "yes"}],
    ]
    images = [image for row in make_rows(5, 12) for image in row.images][:4]
    for number, image in enumerate(images):
        (tmp_path / f"{number}.bin").write_bytes(image)
    named: list[Any] = [["0.bin", "1.bin"], "2.bin", ["3.bin"], None]
    lines = [json.dumps({"conversations": chat, "image": held}) for chat, held in zip(chats, named, strict=True)]
    (tmp_path / "0.jsonl").write_text("\n".join(lines) + "\n")
    source = {"path": "0.jsonl", "messages": "conversations", "tokenizer": "bytes"}
    source["images"] = {"column": "image", "folder": ".", "token": 300, "before": 301, **RULES["dynamic"]}
    catalog = index_recipe(recipe_of(source), tmp_path)
    counts = catalog.sources["chats"].sizes.items["image"].tokens.tolist()
    sizes = catalog.sources["chats"].sizes
    assert set(sizes.items) == {"image"} and "no_loss" in sizes.marks, "only what a module computes is an item"
    a, b, c, d = ([301, *[300] * count] for count in counts)
    first = [*b"User: see ", *a, *b" and ", *b, *b"\nAssistant: "]
    second = [*b"System: s\nUser: ", *c, *b"what\nAssistant: "]
    found = ids_and_labels(catalog, tmp_path)
    assert [ids for ids, _ in found] == [
        [*first, *b"two\n", 256],
        [*second, *b"this\n", 256],
        [*b"User: ", *d, *b"?\n", 256],
        [*b"User: no image\nAssistant: yes\n", 256],
    ]
    assert found[0][1] == [*[-100] * (len(first) - 1), *b"two\n", 256, -100]
    assert found[1][1] == [*[-100] * (len(second) - 1), *b"this\n", 256, -100]
    assert set(found[2][1]) == {-100}
    source["messages"] = "conversations"
    lines[0] = json.dumps({"conversations": chats[0], "image": ["0.bin"]})
    (tmp_path / "0.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(SourceUnreadable, match="row 0 has 2 places in its messages and 1 images"):
        index_recipe(recipe_of(source), tmp_path)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "robot", "content": "x"}], "row 1: it has a message of role 'robot'; the template has assistant, "),
        ([{"role": ["user"], "content": "x"}], r"row 1: it has a message of role \['user'\]; the template has"),
        ([{"role": "user"}], "row 1: it has a message with the keys role, not role and content"),
        (["hello"], "row 1: it has a message that is a str, no mapping"),
        ({"role": "user", "content": "x"}, "row 1: it is no list of messages"),
        ([{"role": "user", "content": 5}], "row 1: it holds a int where a list of texts and items should be"),
        ([{"role": "user", "content": [{"type": "odour"}]}], "row 1: its list holds a part of type 'odour'"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            "row 1: it has an item of type 'image', and the source has none; name their column by images.column",
        ),
        ([{"role": "assistant", "content": None, "tool_calls": [1]}], "row 1: it has a message with calls of tools"),
    ],
)
def test_messages_at_fault_are_named_or_masked(tmp_path: Path, messages: Any, message: str) -> None:
    good = [{"role": "user", "content": "hello"}]
    lines = [json.dumps({"messages": held}) for held in (good, messages, good)]
    (tmp_path / "0.jsonl").write_text("\n".join(lines) + "\n")
    source = {"path": "0.jsonl", "messages": "messages", "tokenizer": "bytes"}
    with pytest.raises(SourceUnreadable, match=message):
        index_recipe(recipe_of(source), tmp_path)
    catalog = index_recipe(recipe_of(source | {"bad_rows": "mask", "max_bad": "40%"}), tmp_path)
    assert (catalog.sources["chats"].sizes.tokens > 0).tolist() == [True, False, True]


def test_bytes_that_are_no_text_are_named_and_half_pairs_are_replaced(tmp_path: Path) -> None:
    good = rb'{"messages": [{"role": "user", "content": "a \ud83d b"}]}'
    bad = b'{"messages": [{"role": "user", "content": "\xff"}]}'
    (tmp_path / "0.jsonl").write_bytes(good + b"\n")
    source = {"path": "0.jsonl", "messages": "messages", "tokenizer": "bytes"}
    [(ids, _)] = ids_and_labels(index_recipe(recipe_of(source), tmp_path), tmp_path)
    assert bytes(ids[:-1]).decode() == "User: a \ufffd b\n"
    (tmp_path / "0.jsonl").write_bytes(good + b"\n" + bad + b"\n" + good + b"\n")
    with pytest.raises(TorchmixError, match=r"0\.jsonl: (row 1|line 2)"):
        index_recipe(recipe_of(source), tmp_path)
    catalog = index_recipe(recipe_of(source | {"bad_rows": "mask", "max_bad": "40%"}), tmp_path)
    assert (catalog.sources["chats"].sizes.tokens > 0).tolist() == [True, False, True]


def test_another_template_needs_another_index_and_has_another_fingerprint(tmp_path: Path) -> None:
    source = write_chats(tmp_path, "chats", "parquet", [make_chats(3, 30)])
    index_recipe(recipe_of(source), tmp_path)
    for chat in ({"turns": {"user": {}, "assistant": {}, "system": {}}}, {"loss": ["user"]}):
        other = recipe_of(source | {"chat": chat})
        with pytest.raises(CatalogStale, match="was built with layout"):
            torchmix.build_loader(other, directory=tmp_path, topology=torchmix.Topology.single())
        is_same = recipe_fingerprint(other) == recipe_fingerprint(recipe_of(source))
        assert is_same == ("loss" in chat)  # which decides no token
    assert recipe_fingerprint(recipe_of(source | {"chat": {}})) == recipe_fingerprint(recipe_of(source))


@pytest.mark.parametrize("flags", ["bool", "mask", "labels"])
@pytest.mark.parametrize("container", ["parquet", "jsonl"])
def test_a_mask_of_loss_beside_ids(tmp_path: Path, container: str, flags: str) -> None:
    rng = np.random.default_rng(1)
    rows = [rng.integers(1, 900, int(n)).tolist() for n in rng.integers(0, 30, 150)]
    masks = [(rng.random(len(row)) < 0.6).tolist() for row in rows]
    held = {
        "bool": masks,
        "mask": [[int(one) for one in mask] for mask in masks],
        "labels": [
            [t if one else -100 for t, one in zip(*pair, strict=True)] for pair in zip(rows, masks, strict=True)
        ],
    }[flags]
    if container == "parquet":
        table = pa.table({"ids": rows, "loss": held})
        pq.write_table(table, tmp_path / "0.parquet", data_page_size=512, write_page_index=flags == "mask")
        path = "0.parquet"
    else:
        lines = [json.dumps({"ids": row, "loss": one}) for row, one in zip(rows, held, strict=True)]
        (tmp_path / "0.jsonl").write_text("\n".join(lines) + "\n")
        path = "0.jsonl"
    source = {"path": path, "tokens": "ids", "loss_mask": "loss"}
    found = ids_and_labels(index_recipe(recipe_of(source), tmp_path), tmp_path)
    assert found == [(row, labels_of(row, mask)) for row, mask in zip(rows, masks, strict=True)]


def test_a_mask_of_another_length_is_named_or_masked(tmp_path: Path) -> None:
    table = pa.table({"ids": [[1, 2], [3, 4, 5], [6]], "loss": [[1, 0], [1], [1]]})
    pq.write_table(table, tmp_path / "0.parquet")
    source = {"path": "0.parquet", "tokens": "ids", "loss_mask": "loss"}
    with pytest.raises(SourceUnreadable, match="row 1: it has 3 tokens and 1 values in 'loss'"):
        index_recipe(recipe_of(source), tmp_path)
    catalog = index_recipe(recipe_of(source | {"bad_rows": "mask", "max_bad": "40%"}), tmp_path)
    assert ids_and_labels(catalog, tmp_path) == [([1, 2], [-100, -100]), ([], []), ([6], [-100])]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chat": {"template": "chatml", "turns": {"user": {}}}}, "has a template by name and turns of its own"),
        ({"chat": {"template": "chatmk"}}, "did you mean 'chatml'"),
        ({"chat": {"loss": ["asistant"]}}, r"chat.loss: 'asistant' is no role.*assistant"),
        ({"chat": {"separator": "x"}}, "stands behind turns of one's own"),
        ({"loss_mask": "loss"}, "says which ids of a column of tokens have loss"),
        ({"text": "text"}, "exactly one of text, tokens, messages, interleaved names the column"),
        ({"tokenizer": None}, "needs a tokenizer"),
    ],
)
def test_recipes_at_fault_are_refused(changes: dict[str, Any], message: str) -> None:
    source = {"path": "x.jsonl", "messages": "m", "tokenizer": "bytes"} | changes
    with pytest.raises(RecipeError, match=message):
        recipe_of({key: value for key, value in source.items() if value is not None})


def test_a_loader_gives_labels_of_the_assistant_alone_and_resumes(tmp_path: Path) -> None:
    chats = [chat for chat in make_chats(5, 120) if chat]
    batch = {"samples": 4, "length": 512}
    recipe = recipe_of(write_chats(tmp_path, "chats", "parquet", [chats]), batch=batch)

    def loader() -> torchmix.StatefulDataLoader:
        topology = torchmix.Topology.single()
        return torchmix.build_loader(recipe, directory=tmp_path, topology=topology, loaders="in_process", max_steps=6)

    wanted = {tuple(ids): labels_of(ids, has_loss) for ids, has_loss in map(plain_document, chats)}
    taken, state, num_seen = [], None, 0
    with loader() as first:
        for number, microbatch in enumerate(first):
            tokens, labels = microbatch.tokens.reshape(-1).tolist(), microbatch.labels_int32.reshape(-1).tolist()
            taken.append((tokens, labels))
            if number == 2:
                state = first.state_dict()
            mask = (microbatch.labels_int32 >= 0).reshape(-1).tolist()
            assert [bool(one) for one in microbatch.loss_mask.reshape(-1).tolist()] == mask
            start = 0
            for end in [place for place, token in enumerate(tokens) if token == 256]:
                while tokens[start] == 0:
                    start += 1
                document = tuple(tokens[start : end + 1])
                assert labels[start : end + 1] == wanted[document]
                num_seen, start = num_seen + 1, end + 1
    assert num_seen > 40 and state is not None
    with loader() as again:
        again.load_state_dict(state)
        rest = [(m.tokens.reshape(-1).tolist(), m.labels_int32.reshape(-1).tolist()) for m in again]
    assert rest == taken[3:]
