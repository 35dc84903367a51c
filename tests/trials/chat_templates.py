"""Trial: ids and masks of chat templates against transformers' own `apply_chat_template`.

    python -m tests.trials.chat_templates --seed 1 --count 2000

Each template of `tests/support/chat_templates.py` takes conversations drawn by the seed. Ids must be equal, and masks
where the template marks what is generated. Where messages hold names of special tokens, their text is rendered by
transformers with others in their place, and is put together here: its `sanitize_control_tokens` encodes such a name
apart from the text beside it. Where transformers is not installed, the trial says so and compares nothing.
"""

from __future__ import annotations

import importlib.util
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tests.support.chat_templates import SPECIALS, TEMPLATES, draw_conversation, make_model_folder
from tests.support.trial import trial_parser, whole
from torchmix.recipe.structs import Chat, RowLayout
from torchmix.transform.documents.layout import DocumentLayout, ItemsOfRows, LaidOut, open_layout
from torchmix.transform.open_tokenizer import Tokenizers

NOT_INSTALLED = "transformers is not installed"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"x": "number"}}}]


def open_folder(folder: Path, **chat: Any) -> DocumentLayout:
    """The layout of rows by the template of a folder."""
    return open_layout(
        "s",
        RowLayout(rows="messages", chat=Chat(template="tokenizer_config.json", **chat)),
        {},
        Tokenizers(folder),
        tokenizer="tokenizer.json",
        begin_id=None,
        end_id=None,
    )


def encode_row(layout: DocumentLayout, row: Any) -> tuple[list[int], LaidOut]:
    """The ids of one row, and where it has no loss."""
    texts = pa.array([json.dumps(row)], pa.large_string())
    values, _ = layout.encode(texts, ItemsOfRows(), 0, 0)
    return values.tolist(), layout.count(texts, ItemsOfRows(), 0, 0)


def mask_of(laid: LaidOut) -> list[int]:
    """1 where a token of one row has loss."""
    mask = np.ones(int(laid.tokens[0]), np.int64)
    for start, tokens in zip(laid.offset_of_run, laid.tokens_of_run, strict=True):
        mask[start : start + tokens] = 0
    return mask.tolist()


def rendered_apart(theirs: Any, messages: list[dict[str, Any]]) -> list[int]:
    """The ids of a conversation whose contents hold names of special tokens, which are text there."""
    stands_for = {name: chr(0xE000 + number) for number, name in enumerate(SPECIALS)}
    held = json.dumps(messages)
    for name, character in stands_for.items():
        held = held.replace(name, character)
    text = theirs.apply_chat_template(json.loads(held), tokenize=False)
    plain = theirs.backend_tokenizer
    plain.encode_special_tokens = True
    ids: list[int] = []
    strips = False
    for piece in re.split(f"({'|'.join(map(re.escape, SPECIALS))})", text):
        if piece in stands_for:
            ids.append(plain.token_to_id(piece))
            strips = plain.get_added_tokens_decoder()[ids[-1]].rstrip
            continue
        piece = piece.lstrip() if strips else piece
        for name, character in stands_for.items():
            piece = piece.replace(character, name)
        ids += plain.encode(piece, add_special_tokens=False).ids
    plain.encode_special_tokens = False
    return ids


def run(seed: int, count: int) -> dict[str, Any]:
    """Rows whose ids or masks differ, by template, and how many were compared."""
    if importlib.util.find_spec("transformers") is None:
        return {"said": NOT_INSTALLED}
    from transformers import PreTrainedTokenizerFast

    found: dict[str, Any] = {}
    for kind, template in TEMPLATES.items():
        rng = np.random.default_rng([seed, len(found)])
        with tempfile.TemporaryDirectory() as name:
            folder = make_model_folder(Path(name), template)
            (folder / "tools.json").write_text(json.dumps(TOOLS))
            theirs = PreTrainedTokenizerFast(
                tokenizer_file=str(folder / "tokenizer.json"),
                bos_token="<|begin|>",
                eos_token="<|im_end|>",
                additional_special_tokens=list(SPECIALS),
            )
            theirs.chat_template = template
            with_tools = open_folder(folder, tools="tools.json")
            plain = open_folder(folder)
            compared = differing = masks = 0
            for _ in range(count):
                names = kind not in ("generation", "chatml") and bool(rng.random() < 0.3)
                messages = draw_conversation(rng, kind, names=names)
                tools = TOOLS if kind == "chatml" and rng.random() < 0.5 else None
                if kind in ("strict", "generation") and messages[0]["role"] == "system" and len(messages) == 1:
                    continue
                options = {"return_assistant_tokens_mask": True} if kind == "generation" else {}
                names = names and tools is None
                said = (
                    {"input_ids": rendered_apart(theirs, messages)}
                    if names
                    else theirs.apply_chat_template(messages, tools=tools, return_dict=True, **options)
                )
                ids, laid = encode_row(with_tools if tools else plain, messages)
                compared += 1
                if ids != said["input_ids"]:
                    differing += 1
                    found.setdefault(
                        "first", {"kind": kind, "messages": messages, "ours": ids, "theirs": said["input_ids"]}
                    )
                if "assistant_masks" in said and mask_of(laid) != said["assistant_masks"]:
                    masks += 1
            found[kind] = {"compared": compared, "ids differ": differing, "masks differ": masks}
    return found


def main() -> None:
    """Run from the command line."""
    whole(trial_parser(__doc__, count=2_000, out="chat_templates.json").parse_args(), run)


if __name__ == "__main__":
    main()
