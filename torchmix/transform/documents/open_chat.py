"""The recipe's words for chat -> a template whose special tokens are ids.

In: `chat` of a checked source, and its tokenizer. Out: a `ChatCutter`. Must hold: the name of a special token of the
tokenizer is that token wherever a template has it; a template of this file whose tokens the tokenizer lacks is an error
that names one. With `bytes` a template is text. Cost: opening the tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from torchmix.recipe.source.chat import template_of
from torchmix.recipe.source.layout_structs import Chat
from torchmix.recipe.source.tokenizer_kind import tokenizer_kind
from torchmix.transform.documents.chat import ChatCutter, Pieces, TurnPieces
from torchmix.transform.open_tokenizer import Tokenizers


def open_chat(source: str, chat: Chat, tokenizers: Tokenizers, *, tokenizer: str, marker: str | None) -> ChatCutter:
    """The template of a source.

    Args:
        source: Its name, for errors.
        chat: What its recipe says.
        tokenizers: Opens its tokenizer.
        tokenizer: The recipe's words for it.
        marker: Stands for an image in a content; None: the source has no images.

    Raises:
        RecipeError: The template has a special token that the tokenizer lacks.
        SourceUnreadable: The tokenizer cannot be opened.
    """
    template = template_of(chat)
    ids: dict[str, int] = {}
    if tokenizer_kind(tokenizer) != "bytes":
        where = f"sources.{source}.chat.template"
        for name in template.tokens:
            found = tokenizers.token_id(source, tokenizer, name, where)
            assert found is not None, "it has a name"
            ids[name] = found
        ids |= {
            name: number for name, number in tokenizers.special_tokens(source, tokenizer).items() if name not in ids
        }
    turns = {
        role: TurnPieces(before=_pieces(turn.before, ids), after=_pieces(turn.after, ids), has_loss=role in chat.loss)
        for role, turn in template.turns.items()
    }
    return ChatCutter(turns=turns, separator=_pieces(template.separator, ids), marker=marker)


def _pieces(text: str, ids: dict[str, int]) -> Pieces:
    """A text of a template, with its special tokens as ids."""
    parts: Sequence[str] = [text]
    if ids:
        longest_first = sorted(ids, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    return tuple(ids.get(part, part) for part in parts if part)
