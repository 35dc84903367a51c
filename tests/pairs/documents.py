"""The tokens of every row by the rules of the documentation, written without torchmix; see `oracle.Document`.

In: what a row holds, and the choices of the columns. Out: its ids, which of them a model is trained to predict, and
where its images stand.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable
from functools import cache, partial
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.pairs.row_maps import MARKER, loud, shifted
from tests.pairs.shelf import ITEMS, MARKERS, RESET, SPLIT, Row
from tests.support.image_oracle import Resize, by_pillow, by_tensors, patches_of
from tests.support.image_record import checksum
from tests.support.oracle import Document
from tests.support.sounds import SOUND
from tests.support.videos import VIDEO
from tests.trials.media import modality_of, units_or_reason

SPECIALS = ("<|begin|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>")
SPECIALS += ("<|eot_id|>", "<img>", "<before>", "<after>", "<pre>", "<mid>", "<suf>", "<snd>", "<vid>")
FIRST_SPECIAL = 257
TOKENS = {"image": (300, "<img>"), "sound": (310, "<snd>"), "video": (320, "<vid>")}
"""The token of items with the tokenizer `bytes`, and its name with a file; by kind."""
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
    "{% for message in messages %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ part.text if part.type == 'text' else {'image': '<img>', 'audio': '<snd>', 'video': '<vid>'}[part.type] }}"
    "{% endfor %}{% endif %}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"
)
"""`jinja` of `TURNS` as a model's folder has it."""
FIM = {"rate": 0.5, "spm": 0.25}
OF_FILES = 0.75
"""The part of the files that are cut of a document of several that is."""
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


def document_of(row: Row, kind: str, has: dict[str, str], keys: Callable[[str, int], int] | None = None) -> Document:
    """A row as a document.

    Args:
        row: See `shelf.rows_of`.
        kind: Its kind of rows.
        has: The row of the matrix, which says what is done with it.
        keys: Of its items in an epoch, by kind and number; None: they are not altered.
    """
    if kind == "ids":
        ids = [2 * token for token in row["ids"]] if has["map"] == "given" else row["ids"]
        if has["fim"] != "none":
            ids = _filled_between(ids, fim_ids(has), has_files=has["fim"] == "files")
        trained = [mark > 0 for mark in row["loss"]] if has["loss_mask"] == "given" else [True] * len(ids)
        return Document(ids, trained, {})
    if has["map"] == "given":
        row = _shouted(row)
    tokenizer = has["tokenizer"]
    begin = [special("<|begin|>")] if has["ends"] != "none" else []
    end = [special("<|endoftext|>")] if has["ends"] != "none" else [256] if tokenizer == "bytes" else []
    if kind in ("chats", "image_chats"):
        return _chat(row, has, begin, end, _Items(row, has, keys))
    if kind == "text":
        ids = _encoded(row["text"], tokenizer)
        if has["fim"] != "none":  # letters of one byte, so that tokens and characters are the same
            ids = _filled(row["text"].encode(), ids, fim_ids(has), b"torchmix-fim-1")
        ids = [*begin, *ids, *end]
        return Document(ids, [True] * len(ids), {})
    items, ids = _Items(row, has, keys), list(begin)
    if kind == "images":
        parts = MARKER.split(items.lacking(row["text"]) + row["text"])
    else:
        kinds = (one for one, _ in row["items"])
        parts = [MARKERS[next(kinds)] if part is None else part for part in row["parts"]]
    items.add(ids, parts)
    ids += end
    return Document(ids, [one not in items.tokens.values() for one in ids], items.images)


class _Items:
    """The items of a row, which take their places one after the other."""

    def __init__(self, row: Row, has: dict[str, str], keys: Callable[[str, int], int] | None) -> None:
        self._has, self._keys = has, keys
        self.tokens = {one: token_of(one, has) for one in kinds_of_items(has)}
        """What stands for items, by kind."""
        self._numbers = dict.fromkeys(self.tokens, 0)
        self._contents = {one: [content for of, content in row["items"] if of == one] for one in self.tokens}
        self.images: dict[int, tuple[float, int]] = {}
        """By first token, checksum and tokens of each."""
        by_name = has["tokenizer"] == "file"
        ids = ([special("<before>")], [special("<after>")]) if by_name else ([301], [302])
        self._around: tuple[list[int], list[int]] = ([], []) if has["image_ids"] == "none" else ids

    def lacking(self, text: str) -> str:
        """Markers of the kinds that a text has no place for."""
        return "".join(
            MARKERS[one] * len(self._contents[one]) for one in sorted(self.tokens) if MARKERS[one] not in text
        )

    def add(self, ids: list[int], parts: list[str]) -> list[bool]:
        """Encode texts and, at odd places, markers behind the ids; whether each id is one of a text."""
        are_texts: list[bool] = []
        for place, part in enumerate(parts):
            if place % 2 == 0:
                ids += (text := _encoded(part, self._has["tokenizer"]))
                are_texts += [True] * len(text)
                continue
            [one] = (of for of in self.tokens if MARKERS[of] == part)
            number, self._numbers[one] = self._numbers[one], self._numbers[one] + 1
            key = None if self._keys is None else self._keys(one, number)
            code, count = _item(one, self._contents[one][number], self._has, key)
            ids += self._around[0]
            self.images[len(ids)] = (code, count)
            ids += [self.tokens[one]] * count + self._around[1]
            are_texts += [False] * (count + len(self._around[0]) + len(self._around[1]))
        return are_texts


def _shouted(row: Row) -> Row:
    """A row whose texts are in capitals, but for markers."""
    messages = [{**message, "content": loud(message["content"])} for message in row["messages"] or ()]
    parts = [part and part.upper() for part in row["parts"] or ()]
    return {**row, "text": loud(row["text"]), "messages": messages, "parts": parts}


def token_of(kind: str, has: dict[str, str]) -> int:
    """The token of items of a kind."""
    token, name = TOKENS[kind]
    return special(name) if has["tokenizer"] == "file" else token


def fim_ids(has: dict[str, str]) -> list[int]:
    """What stands for prefix, middle and suffix."""
    return [special(name) for name in ("<pre>", "<mid>", "<suf>")] if has["tokenizer"] == "file" else [401, 402, 403]


def _filled_between(ids: list[int], marks: list[int], *, has_files: bool) -> list[int]:
    """Ids of which what lies between two RESET is cut; where it has files, what lies between two SPLIT."""
    found: list[int] = []
    for is_end, stretch in groupby(ids, lambda one: one == RESET):
        held = [*stretch]
        if is_end:
            found += held
        elif has_files and SPLIT in held:
            found += _filled_files(held, marks) if _drawn(_bytes(held), OF_IDS)[0] < FIM["rate"] * 2**64 else held
        else:
            found += _filled(_bytes(held), held, marks, OF_IDS)
    return found


def _filled_files(ids: list[int], marks: list[int]) -> list[int]:
    found: list[int] = []
    for is_border, file in groupby(ids, lambda one: one == SPLIT):
        held = [*file]
        found += held if is_border else _filled(_bytes(held), held, marks, OF_IDS, rate=OF_FILES)
    return found


def _bytes(ids: list[int]) -> bytes:
    return np.array(ids, "<i4").tobytes()


OF_IDS = b"torchmix-fim-ids"


def _drawn(content: bytes, person: bytes) -> list[int]:
    digest = hashlib.blake2b(content, digest_size=32, person=person).digest()
    return [int.from_bytes(digest[at : at + 8], "little") for at in range(0, 32, 8)]


def _filled(content: bytes, ids: list[int], marks: list[int], person: bytes, rate: float = FIM["rate"]) -> list[int]:
    """A text or a stretch of ids as the page says that fill in the middle makes it, with FIM."""
    drawn, way, *places = _drawn(content, person)
    if not ids or drawn >= rate * 2**64:
        return ids
    first, second = sorted(place % (len(ids) + 1) for place in places)
    prefix, middle, suffix = ids[:first], ids[first:second], ids[second:]
    before, between, behind = marks
    if way < FIM["spm"] * 2**64:
        return [before, behind, *suffix, between, *prefix, *middle]
    return [before, *prefix, behind, *suffix, between, *middle]


def kinds_of_items(has: dict[str, str]) -> tuple[str, ...]:
    """Sorted; other items are sounds, or videos where ids stand around them."""
    if has["item_kind"] == "other":
        return ("sound",) if has["image_ids"] == "none" else ("video",)
    return ITEMS if has["item_kind"] == "all" else ("image",)


SHORT = 28
"""Pixels of the shorter side before a middle of 16 x 24 is cut out."""
FILL = (10, 200, 30)
FIXED: dict[str, dict[str, Any]] = {
    "crop": {"height": 16, "width": 24, "fit": "crop", "shortest": SHORT},
    "pad": {"height": 16, "width": 16, "fit": "pad"},
    "stretch": {"height": 16, "width": 24, "fit": "stretch"},
}
"""Rules that give one size."""


def rule_of(has: dict[str, str]) -> str:
    """The rule of sizes; with other options images have one size, in the place of what a function says."""
    if has["image_rule"] != "own" or has["image_more"] == "none":
        return has["image_rule"]
    return "pad" if has["image_more"] == "tensor" else "crop" if has["image_ids"] == "none" else "stretch"


def _item(kind: str, content: bytes, has: dict[str, str], key: int | None) -> tuple[float, int]:
    if kind == "image":
        return _image(content, rule_of(has), has["image_more"], key)
    return _medium(content, kind, key)


def _altered(key: int | None) -> Callable[[np.ndarray], np.ndarray]:
    """What the function of the matrix makes of an item with a key."""
    if key is None:
        return lambda values: values
    return partial(shifted, random=np.random.Generator(np.random.PCG64(key)))


@cache
def _image(content: bytes, rule: str, more: str, key: int | None) -> tuple[float, int]:
    if more == "tensor":
        resized: Resize = by_tensors
    else:
        resized = partial(by_pillow, way=Image.Resampling.BILINEAR if more == "given" else Image.Resampling.BICUBIC)
    if rule in FIXED:
        patches, count = _of_one_size(content, rule, resized, key)
    else:
        patches, count, _ = patches_of(content, rule, resized, _altered(key))
    return checksum(patches), count


def _of_one_size(content: bytes, rule: str, resized: Resize, key: int | None) -> tuple[np.ndarray, int]:
    """The patches of an image that becomes 16 pixels high and 24 or, as a square, 16 wide."""
    with Image.open(io.BytesIO(content)) as opened:
        image = Image.fromarray(_altered(key)(np.array(opened.convert("RGB"))))
    height, width = FIXED[rule]["height"], FIXED[rule]["width"]
    if rule == "crop":
        size = [int(SHORT * side / min(image.size)) for side in image.size]
        top, left = (size[1] - height) // 2, (size[0] - width) // 2
        seen = resized(image, (size[0], size[1]))[top : top + height, left : left + width]
    else:
        if rule == "pad":
            side = max(image.size)
            square = Image.new("RGB", (side, side), FILL)
            square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
            image = square
        seen = resized(image, (width, height))
    places = product(range(0, height, 8), range(0, width, 8), (0, 4), (0, 4))
    patches = [seen[y + dy : y + dy + 4, x + dx : x + dx + 4].transpose(2, 0, 1).reshape(-1) for y, x, dy, dx in places]
    return np.stack(patches), len(patches) // 4


@cache
def _medium(content: bytes, kind: str, key: int | None) -> tuple[float, int]:
    """A sound or a video. Values of a sound are torchmix's own, since other code has others in their last bits."""
    if kind == "video":
        units, count = _video(content)
        return checksum(_altered(key)(units)), count
    alter = None if key is None else _altered(key)
    return checksum(np.asarray(units_or_reason(modality_of(SOUND), content, alter))), _tokens_of_sound(content)


@cache
def _video(content: bytes) -> tuple[np.ndarray, int]:
    return VIDEO.units(content), VIDEO.tokens(content)


_tokens_of_sound = cache(SOUND.tokens)


def _chat(row: Row, has: dict[str, str], begin: list[int], end: list[int], items: _Items) -> Document:
    if not row["messages"]:
        return Document([], [], {})
    chosen = "plain" if has["chat"] == "none" else has["chat"]
    roles = LOSS.get(chosen, ("assistant",))
    ids, trained = list(begin), [False] * len(begin)
    lacking = items.lacking("".join(message["content"] for message in row["messages"]))
    for message in row["messages"]:
        before, after, separator = TURNS[chosen][message["role"]]
        is_trained = message["role"] in roles
        content = message["content"]
        if message["role"] == "user":
            content, lacking = lacking + content, ""
        for text, has_loss in ((before, False), (content + after, is_trained), (separator, False)):
            trained += [has_loss and is_text for is_text in items.add(ids, MARKER.split(text))]
    return Document([*ids, *end], [*trained, *[row["messages"][-1]["role"] in roles] * len(end)], items.images)


def _files_of_fim(has: dict[str, str]) -> dict[str, Any]:
    return {"split": SPLIT, "fragment_rate": OF_FILES} if has["fim"] == "files" else {}


def keys_of_source(kind: str, format: str, has: dict[str, str]) -> dict[str, Any]:
    """What a recipe says of `main` so that it has these documents."""
    if format == "megatron" and kind == "ids" and "given" not in (has["map"], has["loss_mask"]):
        return {} if has["fim"] == "none" else {"fim": {**FIM, "ids": fim_ids(has), "eod": RESET, **_files_of_fim(has)}}
    inside = "json." if format == "webdataset" else ""
    column = {"chats": "messages", "image_chats": "messages", "images": "text", "interleaved": "parts"}.get(kind, kind)
    key = {"ids": "tokens", "messages": "messages", "parts": "interleaved"}.get(column, "text")
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
    if has["fim"] != "none":
        ids = ["<pre>", "<mid>", "<suf>"] if has["tokenizer"] == "file" else fim_ids(has)
        keys["fim"] = {**FIM, "ids": ids}
        keys["fim"] |= {"eod": RESET} if kind == "ids" else {"by": "character"} if keys["tokenizer"] == "bytes" else {}
        keys["fim"] |= _files_of_fim(has)
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
