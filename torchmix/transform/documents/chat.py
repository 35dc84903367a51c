"""A conversation -> the parts of its document, by a template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from torchmix.recipe.sources import template_of, tokenizer_kind
from torchmix.recipe.structs import Chat
from torchmix.transform.documents.row_parts import (
    Content,
    PartsWriter,
    RowParts,
    RowsToCut,
    at_markers,
    contents,
    number_of_role,
    written,
)
from torchmix.transform.open_tokenizer import Tokenizers

# --- A conversation -> the parts of its document, by a template.
#
# What the template puts around a content never mixes with it: names of special tokens in the template are these
# tokens, in a content they are text. A content is a text, in which markers stand for items, or a list of texts and
# items. Items of a kind stand before the first content of the user where the conversation has no places for them. A
# conversation without messages has no tokens. Cost: parsing the JSON, and some Python for each message.

Pieces = tuple[str | int, ...]
"""Texts of a template, and ids of its special tokens."""
_CALLS = ("tool_calls", "function_call")


class TurnPieces(msgspec.Struct, frozen=True, kw_only=True):
    """What stands around the content of a role."""

    before: Pieces
    after: Pieces
    has_loss: bool
    """Whether the model is trained on the content, on `after`, and on what ends a document behind such a turn."""


class ChatCutter(msgspec.Struct, frozen=True, kw_only=True):
    """Implements `RowCutter`."""

    turns: dict[str, TurnPieces]
    """By role."""
    separator: Pieces
    """Behind each turn, without loss."""
    markers: Mapping[str, str]
    """By kind, sorted, what stands for an item in a content; empty: the source has no items."""

    @property
    def cut_id(self) -> str:
        """See `RowCutter`."""
        turns = {role: [turn.before, turn.after, turn.has_loss] for role, turn in self.turns.items()}
        markers = list(self.markers.values())
        marker = markers if len(markers) > 1 else next(iter(markers), None)
        return f"chat-2:{json.dumps([turns, self.separator, marker], sort_keys=True, separators=(',', ':'))}"

    @property
    def highest_id(self) -> int:
        """See `RowCutter`."""
        pieces = [*self.separator, *(piece for turn in self.turns.values() for piece in (*turn.before, *turn.after))]
        return max((piece for piece in pieces if isinstance(piece, int)), default=-1)

    def places(self, kind: str) -> str:
        """See `RowCutter`."""
        return "places in its messages"

    @property
    def has_losses(self) -> bool:
        """See `RowCutter`."""
        return True

    @property
    def roles(self) -> Sequence[str]:
        """See `RowCutter`."""
        return sorted(self.turns)

    def cut(self, rows: RowsToCut) -> RowParts:
        """See `RowCutter`."""

        def write(writer: PartsWriter, number: int, held: Any) -> bool:
            turns = self._turns(held, None if rows.roles is None else rows.roles[number])
            self._write(writer, turns, rows.num_items[:, number].tolist())
            if turns:
                writer.end_row(has_loss=self.turns[turns[-1][0]].has_loss)
            return bool(turns)

        return written(rows, write).row_parts(has_losses=True)

    def _turns(self, held: Any, roles: list[int] | None) -> list[tuple[str, Content]]:
        """Role, and texts and items of each message."""
        if not isinstance(held, list):
            raise ValueError("it is no list of messages")
        if roles is None:
            return [self._message(message) for message in held]
        if len(roles) != len(held):
            raise ValueError(f"it has {len(held)} contents and {len(roles)} roles")
        names = self.roles
        return [(names[role], self._content(content)) for role, content in zip(roles, held, strict=True)]

    def _message(self, message: Any) -> tuple[str, Content]:
        if not isinstance(message, dict):
            raise ValueError(f"it has a message that is a {type(message).__name__}, no mapping of role and content")
        role, content = ("role", "content") if "role" in message else ("from", "value")
        if role not in message or content not in message:
            raise ValueError(f"it has a message with the keys {', '.join(message) or 'none'}, not role and content")
        if any(message.get(key) for key in _CALLS):
            raise ValueError(
                "it has a message with calls of tools, which this template does not take; "
                "name the template of a model's folder by chat.template, or write the calls into the content"
            )
        return self.roles[number_of_role(self.roles, message[role])], self._content(message[content])

    def _content(self, held: Any) -> Content:
        markers = tuple(self.markers.values())
        found: Content = []
        for part in [] if held is None else contents(held, tuple(self.markers)):
            found += at_markers(part, markers) if isinstance(part, str) else [part]
        return found

    def _write(self, writer: PartsWriter, turns: list[tuple[str, Content]], num_items: list[int]) -> None:
        placed = {part for _, content in turns for part in content if isinstance(part, int)}
        if turns:
            first = next((content for role, content in turns if role == "user"), turns[0][1])
            first[:0] = [kind for kind, count in enumerate(num_items) if kind not in placed for _ in range(count)]
        for role, content in turns:
            turn = self.turns[role]
            _write_pieces(writer, turn.before, has_loss=False)
            for part in content:
                if isinstance(part, int):
                    writer.item(part)
                else:
                    writer.text(part, has_loss=turn.has_loss)
            _write_pieces(writer, turn.after, has_loss=turn.has_loss)
            _write_pieces(writer, self.separator, has_loss=False)


def _write_pieces(writer: PartsWriter, pieces: Pieces, *, has_loss: bool) -> None:
    for piece in pieces:
        if isinstance(piece, int):
            writer.id(piece, has_loss=has_loss)
        else:
            writer.text(piece, has_loss=has_loss)


# --- The recipe's words for chat -> a template whose special tokens are ids.
#
# The name of a special token of the tokenizer is that token wherever a template has it; a template of this file whose
# tokens the tokenizer lacks is an error that names one. With `bytes` a template is text. Cost: opening the tokenizer.


def open_chat(
    source: str, chat: Chat, tokenizers: Tokenizers, *, tokenizer: str, markers: Mapping[str, str]
) -> ChatCutter:
    """The template of a source.

    Args:
        source: Its name, for errors.
        chat: What its recipe says.
        tokenizers: Opens its tokenizer.
        tokenizer: The recipe's words for it.
        markers: By kind, what stands for an item in a content.

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
    return ChatCutter(turns=turns, separator=_pieces(template.separator, ids), markers=markers)


def _pieces(text: str, ids: dict[str, int]) -> Pieces:
    """A text of a template, with its special tokens as ids."""
    parts: Sequence[str] = [text]
    if ids:
        longest_first = sorted(ids, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    return tuple(ids.get(part, part) for part in parts if part)
