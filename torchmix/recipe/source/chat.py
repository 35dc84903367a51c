"""What a recipe says of rows that are no plain text or ids: checks, templates by name, and what decides tokens.

In: a source of the recipe. Out: nothing, or the first fault; its `RowLayout`; a template. Must hold: the words decide,
before anything is opened. Cost: none.

Templates follow the chat templates of the models that they are named after: ChatML is Qwen's, without a system message
of its own. `plain` needs no special tokens.
"""

from __future__ import annotations

import msgspec

from torchmix.errors import RecipeError
from torchmix.recipe.build import nearest
from torchmix.recipe.source.layout_structs import Chat, RowLayout, Turn
from torchmix.recipe.structs import Source

ROLES = ("assistant", "system", "tool", "user")
"""Roles of the templates below."""


class Template(msgspec.Struct, frozen=True, kw_only=True):
    """What stands around the messages of a document."""

    turns: dict[str, Turn]
    """By role."""
    separator: str = ""
    """Behind each turn."""
    tokens: tuple[str, ...] = ()
    """Special tokens that it needs."""


TEMPLATES = {
    "plain": Template(turns={role: Turn(before=f"{role.capitalize()}: ", after="\n") for role in ROLES}),
    "chatml": Template(
        turns={role: Turn(before=f"<|im_start|>{role}\n", after="<|im_end|>") for role in ROLES},
        separator="\n",
        tokens=("<|im_start|>", "<|im_end|>"),
    ),
    "llama3": Template(
        turns={
            role: Turn(
                before=f"<|start_header_id|>{'ipython' if role == 'tool' else role}<|end_header_id|>\n\n",
                after="<|eot_id|>",
            )
            for role in ROLES
        },
        tokens=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
}


def template_of(chat: Chat) -> Template:
    """The template of a checked source."""
    if chat.turns is not None:
        return Template(turns=chat.turns, separator=chat.separator or "")
    return TEMPLATES[chat.template or "plain"]


def layout_of(source: Source) -> RowLayout | None:
    """How rows of a checked source become documents; None for plain texts and ids."""
    if source.messages is not None:
        return RowLayout(rows="messages", chat=source.chat or Chat())
    if source.interleaved is not None:
        return RowLayout(rows="interleaved")
    return None if source.loss_mask is None else RowLayout(rows="tokens", loss_mask=source.loss_mask)


def column_of(source: Source) -> str | None:
    """The column that holds the documents; None in formats without columns."""
    return source.text or source.tokens or source.messages or source.interleaved


def check_layout(source: Source, where: str) -> None:
    """Check `messages`, `chat`, `interleaved` and `loss_mask` of a source; RecipeError at the first fault."""
    if source.chat is not None and source.messages is None:
        raise RecipeError("is of messages; name their column by messages, or remove it", f"{where}.chat")
    if source.loss_mask is not None:
        if source.tokens is None or source.map is not None:
            message = "says which ids of a column of tokens have loss; name that by tokens, without a map, or remove it"
            raise RecipeError(message, f"{where}.loss_mask")
        if not source.loss_mask:
            raise RecipeError("is empty; name a column", f"{where}.loss_mask")
    for key in ("messages", "interleaved"):
        if getattr(source, key) is not None and source.map is not None:
            raise RecipeError(f"a source has {key} or a map, not both; remove one", where)
    if layout_of(source) is not None and source.keep is not None:
        raise RecipeError("ids of such rows are not kept; remove keep", f"{where}.keep")
    if source.interleaved is not None and source.images is None:
        raise RecipeError("its rows have images; say by images where they are", f"{where}.interleaved")
    if source.chat is not None:
        _check_chat(source.chat, f"{where}.chat")


def _check_chat(chat: Chat, where: str) -> None:
    if chat.turns is not None and chat.template is not None:
        raise RecipeError("has a template by name and turns of its own; remove one", where)
    if chat.separator is not None and chat.turns is None:
        raise RecipeError("stands behind turns of one's own; add turns, or remove it", f"{where}.separator")
    if chat.turns is not None and not chat.turns:
        raise RecipeError("is empty; write before and after of each role", f"{where}.turns")
    roles = sorted(template_of(chat).turns)
    if not chat.loss:
        raise RecipeError("is empty; name a role, as assistant", f"{where}.loss")
    for role in chat.loss:
        if role not in roles:
            message = f"{role!r} is no role of the template, which has {', '.join(roles)}{nearest(role, roles)}"
            raise RecipeError(message, f"{where}.loss")


def order_of_layout(source: Source) -> list[object]:
    """What of it decides which tokens a document has; nothing for plain texts and ids. Loss decides no token."""
    layout = layout_of(source)
    if layout is None or layout.rows == "tokens":
        return []
    kept: dict[str, object] = {"rows": layout.rows, "column": column_of(source)}
    if layout.chat is not None:
        template = template_of(layout.chat)
        turns = {role: [turn.before, turn.after] for role, turn in template.turns.items()}
        kept |= {"turns": turns, "separator": template.separator}
    return [msgspec.to_builtins(kept)]
