"""The tokens of every row by the rules of the documentation, written without torchmix; see `oracle.Document`.

In: what a row holds, and the choices of the columns. Out: its ids, which of them a model is trained to predict, and
where its images stand.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from tests.pairs.shelf import Row
from tests.support.image_oracle import patches_of
from tests.support.image_record import checksum
from tests.support.oracle import Document

SPECIALS = ("<|begin|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>")
SPECIALS += ("<|eot_id|>", "<img>", "<before>", "<after>")
FIRST_SPECIAL = 257
IMAGE = 300
"""The token of images with the tokenizer `bytes`; with a file it has a name."""
TURNS = {
    "plain": {role: (f"{role.capitalize()}: ", "\n", "") for role in ("system", "user", "assistant")},
    "chatml": {role: (f"<|im_start|>{role}\n", "<|im_end|>", "\n") for role in ("system", "user", "assistant")},
    "llama3": {
        role: (f"<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", "")
        for role in ("system", "user", "assistant")
    },
    "jinja": {
        role: (f"<|start_header_id|>{role}<|end_header_id|>", "<|eot_id|>", "")
        for role in ("system", "user", "assistant")
    },
    "turns": {role: (f"[{role[0]}]", "!", ";") for role in ("system", "user", "assistant")},
}
TEMPLATE = (
    "{% for message in messages %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>' + message.content }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"
)
"""`jinja` of `TURNS` as a model's folder has it."""
LOSS = {"turns": ("user", "assistant")}
"""Roles that are trained on; else the assistant."""


def write_tokenizer(path: Path) -> None:
    """A tokenizer.json whose ids are bytes, and the special tokens behind them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={letter: byte for byte, letter in letters().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|pad|>", special=True)])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.save(str(path))
    held = json.loads(path.read_text())["added_tokens"]
    assert {one["content"]: one["id"] for one in held}["<|begin|>"] == FIRST_SPECIAL


@cache
def letters() -> dict[int, str]:
    """The letter that GPT-2's tokenizers write for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def special(token: str) -> int:
    """Its id."""
    return FIRST_SPECIAL + SPECIALS.index(token)


def _encoded(text: str, tokenizer: str) -> list[int]:
    if tokenizer == "bytes":
        return [*text.encode()]
    found: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, SPECIALS)) + ")", text):
        found += [special(part)] if part in SPECIALS else [*part.encode()]
    return found


def document_of(row: Row, kind: str, has: dict[str, str]) -> Document:
    """A row as a document.

    Args:
        row: See `shelf.rows_of`.
        kind: Its kind of rows.
        has: The row of the matrix, which says what is done with it.
    """
    if kind == "ids":
        ids = [2 * token for token in row["ids"]] if has["map"] == "given" else row["ids"]
        trained = [mark > 0 for mark in row["loss"]] if has["loss_mask"] == "given" else [True] * len(ids)
        return Document(ids, trained, {})
    if has["map"] == "given":
        row = _shouted(row)
    tokenizer, token = has["tokenizer"], _image_token(has)
    begin = [special("<|begin|>")] if has["ends"] != "none" else []
    end = [special("<|endoftext|>")] if has["ends"] != "none" else [256] if tokenizer == "bytes" else []
    if kind == "chats":
        return _chat(row, has, begin, end)
    if kind == "text":
        ids = [*begin, *_encoded(row["text"], tokenizer), *end]
        return Document(ids, [True] * len(ids), {})
    parts = row["parts"]
    if kind == "images":
        text = row["text"] if "<image>" in row["text"] else "<image>" * len(row["image"]) + row["text"]
        first, *others = text.split("<image>")
        parts = [first]
        for part in others:
            parts += [None, part]
    ids, images, contents = list(begin), dict[int, tuple[float, int]](), iter(row["image"])
    around = (
        ([], [])
        if has["image_ids"] == "none"
        else ([special("<before>")], [special("<after>")])
        if tokenizer == "file"
        else ([301], [302])
    )
    for part in parts:
        if part is not None:
            ids += _encoded(part, tokenizer)
            continue
        code, count = _image(next(contents), has["image_rule"])
        ids += around[0]
        images[len(ids)] = (code, count)
        ids += [token] * count + around[1]
    ids += end
    return Document(ids, [one != token for one in ids], images)


def _shouted(row: Row) -> Row:
    """A row whose texts are in capitals, but for markers."""
    messages = [{**message, "content": message["content"].upper()} for message in row["messages"] or ()]
    parts = [part and part.upper() for part in row["parts"] or ()]
    text = "<image>".join(part.upper() for part in row["text"].split("<image>"))
    return {**row, "text": text, "messages": messages, "parts": parts}


def _image_token(has: dict[str, str]) -> int:
    return special("<img>") if has["tokenizer"] == "file" else IMAGE


@cache
def _image(content: bytes, rule: str) -> tuple[float, int]:
    patches, count, _ = patches_of(content, rule)
    return checksum(patches), count


def _chat(row: Row, has: dict[str, str], begin: list[int], end: list[int]) -> Document:
    if not row["messages"]:
        return Document([], [], {})
    chosen = "plain" if has["chat"] == "none" else has["chat"]
    roles = LOSS.get(chosen, ("assistant",))
    ids, trained = list(begin), [False] * len(begin)
    for message in row["messages"]:
        before, after, separator = TURNS[chosen][message["role"]]
        is_trained = message["role"] in roles
        for text, has_loss in ((before, False), (message["content"] + after, is_trained), (separator, False)):
            found = _encoded(text, has["tokenizer"])
            ids += found
            trained += [has_loss] * len(found)
    return Document([*ids, *end], [*trained, *[row["messages"][-1]["role"] in roles] * len(end)], {})


def keys_of_source(kind: str, format: str, has: dict[str, str]) -> dict[str, Any]:
    """What a recipe says of `main` so that it has these documents."""
    if format == "megatron" and kind == "ids" and "given" not in (has["map"], has["loss_mask"]):
        return {}
    inside = "json." if format == "webdataset" else ""
    column = {"chats": "messages", "images": "text", "interleaved": "parts"}.get(kind, kind)
    key = {"ids": "tokens", "chats": "messages", "interleaved": "interleaved"}.get(kind, "text")
    keys: dict[str, Any] = {key: inside + column}
    if has["tokenizer"] != "none":
        keys["tokenizer"] = {"bytes": "bytes", "file": "tokenizer.json"}[has["tokenizer"]]
    if has["ends"] != "none":
        by_name = has["ends"] == "name"
        keys["begin_id"] = "<|begin|>" if by_name else special("<|begin|>")
        keys["end_id"] = "<|endoftext|>" if by_name else special("<|endoftext|>")
    if has["map"] == "given":
        names = {"ids": "doubled", "text": "shout", "images": "shout_around"}
        keys["map"] = f"tests.pairs.row_maps:{names.get(kind, 'shout_inside')}"
    if has["keep"] == "tokens":
        keys["keep"] = "tokens"
    if has["loss_mask"] == "given":
        keys["loss_mask"] = inside + "loss"
    if has["chat"] == "turns":
        turns = {role: {"before": one[0], "after": one[1]} for role, one in TURNS["turns"].items()}
        keys["chat"] = {"turns": turns, "separator": ";", "loss": ["user", "assistant"]}
    elif has["chat"] == "jinja":
        keys["chat"] = {"template": "template.jinja"}
    elif has["chat"] != "none":
        keys["chat"] = {"template": has["chat"]}
    return keys
