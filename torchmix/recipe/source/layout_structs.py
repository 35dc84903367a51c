"""What a recipe says of rows that are no plain text or ids: chats, lists of texts and images, masks of loss.

In: what the user writes. Out: the Structs. Must hold: they check nothing; see chat.py. Cost: none.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Turn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands around the content of a message."""

    before: str = ""
    """Text before it, without loss. The names of special tokens are these tokens."""
    after: str = ""
    """Text after it, with the loss of the content: what ends a turn is learned with it."""


class Chat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How messages become one document."""

    template: Literal["plain", "chatml", "llama3"] | None = None
    """A template that is known by name; None: `plain`, or what `turns` says."""
    turns: dict[str, Turn] | None = None
    """A template of one's own: what stands around the content of each role. A message of another role is an error."""
    separator: str | None = None
    """Text behind each turn of `turns`, without loss; None: nothing."""
    loss: tuple[str, ...] = ("assistant",)
    """The roles whose contents are trained on."""


class RowLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rows of a source become documents, where they are no plain text or ids; made from the keys of a source."""

    rows: Literal["messages", "interleaved", "tokens"]
    """What the column holds."""
    chat: Chat | None = None
    """The template of messages."""
    loss_mask: str | None = None
    """The column that says which tokens have loss."""
