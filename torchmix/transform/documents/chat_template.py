"""A conversation -> the parts of its document, by the chat template of a model's folder.

The template runs as transformers runs it (apply_chat_template of release 5: sandbox, filters, missing keys for
nulls), and gives the same text. Special tokens that it writes are ids. The names of special tokens in a message are
text, as with its sanitize_control_tokens=True, so that no message ends a turn.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from torchmix.errors import RecipeError, SourceUnreadable
from torchmix.recipe.items import kind_of_part, type_of_items
from torchmix.recipe.structs import Chat
from torchmix.transform.documents.row_parts import (
    PartsWriter,
    RowParts,
    RowsToCut,
    at_markers,
    parsed,
    written,
)
from torchmix.transform.open_tokenizer import Tokenizers
from torchmix.transform.tokenizer import SpecialToken

# --- The file of a template.

CONFIG = "tokenizer_config.json"
ROLES = ("assistant", "developer", "function", "system", "tool", "user")
"""Roles of messages that are structs of a file, whose columns have room for role and content alone."""
_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TemplateFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's folder says of chats."""

    text: str
    """The template."""
    tokens: Mapping[str, str]
    """Names of special tokens that it may use, such as `eos_token`."""


def read_template(path: Path, where: str) -> TemplateFile:
    """Read a template.

    Args:
        path: `tokenizer_config.json`, or a file that ends in `.jinja`, beside which that may lie.
        where: Path of keys in the recipe, for errors.

    Raises:
        SourceUnreadable: A file is missing, or has no template.
    """
    config_path = path if path.suffix == ".json" else path.with_name(CONFIG)
    config: dict[str, Any] = {}
    if path.suffix == ".json" or config_path.exists():
        try:
            config = msgspec.json.decode(_text(config_path, where), type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise SourceUnreadable(f"{where}: {config_path} is no JSON object ({error})") from None
    held = config.get("chat_template")
    if path.suffix != ".json":
        held = _text(path, where)
    elif held is None and path.with_name("chat_template.jinja").exists():
        held = _text(path.with_name("chat_template.jinja"), where)
    if isinstance(held, list):  # several with names
        named = {one.get("name"): one.get("template") for one in held if isinstance(one, dict)}
        held = named.get("default")
    if not isinstance(held, str):
        raise SourceUnreadable(
            f"{where}: {path} has no chat_template, and no chat_template.jinja lies beside it; name the file of one"
        )
    tokens = {key: config[key] for key in _TOKEN_KEYS if config.get(key) is not None}
    tokens = {key: token["content"] if isinstance(token, dict) else token for key, token in tokens.items()}
    return TemplateFile(text=held, tokens={key: token for key, token in tokens.items() if isinstance(token, str)})


def _text(path: Path, where: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceUnreadable(
            f"{where}: cannot read {path}: {getattr(error, 'strerror', None) or error}; paths are relative to the "
            "recipe's folder"
        ) from error


# --- A template that is compiled, and what it must not do.
#
# A row has the same tokens on each day and in each process, so a template that reads a clock or draws a number is
# refused. It is compiled where it is opened, which loads jinja2.

TEXT_MARK = "\ufdd0"
"""Stands behind each character of a special token's name in a message; no text may hold it."""
_BEGIN, _END = "\ufdd1", "\ufdd2"
"""Around what `{% generation %}` encloses."""
_MARKS = re.compile(f"[{TEXT_MARK}{_BEGIN}{_END}]")
_RANDOM = ("random", "shuffle")
_LOREM = "lipsum"
_ENCLOSE = "enclose what is trained on by {% generation %} and {% endgeneration %} in the template"


class _ReadsClock(Exception):
    """The template asks for the date."""


def _compiled(file: TemplateFile, where: str) -> Callable[..., str]:
    """The template as a function of what it may use, which gives a text with marks around generations."""
    try:
        import jinja2
        import jinja2.ext
        import jinja2.meta
        import jinja2.nodes
        import jinja2.sandbox
    except ImportError as error:
        raise RecipeError("a chat template of a file needs the package jinja2: pip install jinja2", where) from error

    class Generation(jinja2.ext.Extension):
        """Marks what the model generates."""

        tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def strftime_now(format: str) -> str:
        raise _ReadsClock(format)

    def tojson(
        x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    try:
        tree = environment.parse(file.text)
        drawn = {node.name for node in tree.find_all(jinja2.nodes.Filter)} & set(_RANDOM)
        if drawn or _LOREM in {node.name for node in tree.find_all(jinja2.nodes.Name)}:
            raise RecipeError(
                f"the template draws random text (by {', '.join(sorted(drawn)) or _LOREM}), so that a row would have "
                "other tokens each time; take that out",
                where,
            )
        template = environment.from_string(file.text)
    except jinja2.TemplateSyntaxError as error:
        raise RecipeError(f"the template cannot be read: line {error.lineno}: {error.message}", where) from error
    return template.render


def _jinja_version() -> str:
    import jinja2

    return ".".join(jinja2.__version__.split(".")[:2])


# --- A conversation -> its parts.
#
# Where a template has no `{% generation %}`, what the model is trained on is found by comparing texts of fewer
# messages: a message begins where the text of those before it ends, with the prompt to generate, and ends where its
# own text ends. A template that writes a message otherwise once another follows has the end at the token that ends a
# turn. Cost: rendering twice for each message that is trained on.


class TemplateCutter(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Implements `RowCutter`."""

    template_id: str
    """Says what all tokens follow from."""
    render: Callable[..., str]
    control: Mapping[str, SpecialToken]
    """By name, the tokens that are ids where the template writes them."""
    names: re.Pattern[str]
    """Finds their names, but for those that stand in messages."""
    variables: Mapping[str, Any]
    """What the template may use beside messages, tools and the prompt."""
    tools: Any
    """What a conversation without tools of its own may call; None: nothing."""
    loss: tuple[str, ...]
    """Roles that are trained on."""
    markers: Mapping[str, str]
    """By kind, sorted, what stands for an item in a content."""
    places_of_items: Mapping[str, int]
    """By name of a token, the number of the kind that it stands for."""
    end_of_turn: str | None
    """The name of the token that ends a turn of the assistant."""
    has_generations: bool
    """The template says itself what is generated."""
    offsets: Callable[[str], Sequence[tuple[int, int]]]
    """The characters of each token of a text."""

    @property
    def cut_id(self) -> str:
        """See `RowCutter`."""
        return f"template-1:{self.template_id}"

    @property
    def highest_id(self) -> int:
        """See `RowCutter`."""
        return max((token.id for token in self.control.values()), default=-1)

    @property
    def has_losses(self) -> bool:
        """See `RowCutter`."""
        return True

    @property
    def roles(self) -> Sequence[str]:
        """See `RowCutter`."""
        return ROLES

    def places(self, kind: str) -> str:
        """See `RowCutter`."""
        return "places in what the template makes of its messages"

    def cut(self, rows: RowsToCut) -> RowParts:
        """See `RowCutter`."""
        bare: list[tuple[int, int, int]] = []

        def write(writer: PartsWriter, number: int, held: Any) -> bool:
            roles = None if rows.roles is None else rows.roles[number]
            messages, tools = self._messages(held, roles, rows.num_items[:, number].tolist())
            if messages:
                self._write(writer, bare, messages, tools, needs_loss=rows.needs_loss)
            return bool(messages)

        return written(rows, write).row_parts(has_losses=True, bare=bare)

    def _messages(
        self, held: Any, roles: list[int] | None, num_items: list[int]
    ) -> tuple[list[dict[str, Any]], list[Any] | None]:
        """The messages and tools of a row as the template takes them, with a place for each item."""
        tools = self.tools
        if isinstance(held, dict):
            if set(held) - {"messages", "tools"} or "messages" not in held:
                raise ValueError(f"it has the keys {', '.join(held) or 'none'}, not messages and tools")
            tools = held.get("tools", tools)
            held = held["messages"]
        if isinstance(tools, str):
            tools = parsed(tools.encode())
        if not isinstance(held, list):
            raise ValueError("it is no list of messages")
        if not (tools is None or isinstance(tools, list)):
            raise ValueError(f"its tools are a {type(tools).__name__}, no list")
        if roles is not None:
            if len(roles) != len(held):
                raise ValueError(f"it has {len(held)} contents and {len(roles)} roles")
            held = [{"role": ROLES[role], "content": content} for role, content in zip(roles, held, strict=True)]
        messages = [_message(self._as_text(message)) for message in held]
        self._place_items(messages, num_items)
        return messages, None if tools is None else self._as_text(tools)

    def _as_text(self, held: Any) -> Any:
        """The same, in which names of special tokens are text."""
        if isinstance(held, str):
            if found := _MARKS.search(held):
                raise ValueError(f"it holds the character U+{ord(found[0]):04X}, which is none of any text")
            return self.names.sub(lambda name: "".join(f"{one}{TEXT_MARK}" for one in name[0]), held)
        if isinstance(held, dict):
            return {self._as_text(key): self._as_text(value) for key, value in held.items()}
        return [self._as_text(one) for one in held] if isinstance(held, list) else held

    def _place_items(self, messages: list[dict[str, Any]], num_items: list[int]) -> None:
        """Give each item a place: where a marker or a part is, else before the first content of the user."""
        if not any(num_items):
            return
        types = tuple(map(type_of_items, self.markers))
        markers = tuple(self._as_text(marker) for marker in self.markers.values())
        placed: set[str] = set()
        for message in messages:
            held = message.get("content")
            parts: list[Any] = []
            for part in [held] if isinstance(held, str) else held if isinstance(held, list) else []:
                if isinstance(part, str):
                    found = at_markers(part, markers)
                    parts += [
                        {"type": "text", "text": one} if isinstance(one, str) else {"type": types[one]} for one in found
                    ]
                else:
                    kind = kind_of_part(part.get("type")) if isinstance(part, dict) else None
                    parts.append(part if kind is None else {"type": type_of_items(kind)})
            parts = [part for part in parts if not (isinstance(part, dict) and part.get("text") == "")]
            if any(isinstance(part, dict) and part.get("type") in types for part in parts):
                message["content"] = parts
                placed |= {part["type"] for part in parts if part.get("type") in types}
        missing = [
            {"type": one}
            for one, count in zip(types, num_items, strict=True)
            if one not in placed
            for _ in range(count)
        ]
        if missing:
            first = next(
                (message for message in messages if message["role"] == "user"), messages[0] if messages else None
            )
            if first is not None:
                held = first.get("content")
                first["content"] = [
                    *missing,
                    *([{"type": "text", "text": held}] if isinstance(held, str) else held or []),
                ]

    def _text(self, messages: list[dict[str, Any]], tools: list[Any] | None, *, prompts: bool = False) -> str:
        """What the template makes of messages, with marks."""
        try:
            return self.render(
                **{"documents": None, **self.variables}, messages=messages, tools=tools, add_generation_prompt=prompts
            )
        except _ReadsClock as error:
            raise SourceUnreadable(clock_error(str(error))) from None
        except Exception as error:  # whatever the template does with a row that it does not expect
            why = ""
            if self.markers and any(isinstance(message.get("content"), list) for message in messages):
                why = "; contents with items are lists of parts, and a template of texts alone has no place for these"
            raise ValueError(f"the template refuses it: {error}{why}") from None

    def _write(
        self,
        writer: PartsWriter,
        bare: list[tuple[int, int, int]],
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        *,
        needs_loss: bool,
    ) -> None:
        """Write a row: texts between special tokens, each encoded as a whole, and runs of their tokens without loss."""
        marked = self._text(messages, tools)
        if "\\ufdd" in marked:
            raise ValueError("the template escapes the characters of a text that holds the name of a special token")
        text, losses = _without_generations(marked)
        if needs_loss and not self.has_generations:
            losses = self._losses(text, messages, tools)
        strips = False
        end = 0
        has_loss = False
        for start, stop, name in [*_found(self.names, text), (len(text), len(text), None)]:
            token = None if name is None else self.control[name]
            piece = text[end:start]
            if strips:
                end += len(piece) - len(piece.lstrip())
                piece = piece.lstrip()
            if token is not None and token.lstrip:
                piece = piece.rstrip()
            if piece:
                has_loss = self._write_text(writer, bare, piece, end, losses if needs_loss else [])
            if token is not None:
                assert name is not None
                has_loss = _overlaps(start, stop, losses)
                kind = self.places_of_items.get(name)
                if kind is None:
                    writer.id(token.id, has_loss=has_loss)
                else:
                    writer.item(kind)
                    has_loss = False
            strips = token is not None and token.rstrip
            end = stop
        writer.end_row(has_loss=has_loss)

    def _write_text(
        self,
        writer: PartsWriter,
        bare: list[tuple[int, int, int]],
        piece: str,
        start: int,
        losses: list[tuple[int, int]],
    ) -> bool:
        """Write a text that begins at a character; returns whether its end is trained on."""
        plain = piece.replace(TEXT_MARK, "")
        inside = [
            (first - start, stop - start) for first, stop in losses if first < start + len(piece) and stop > start
        ]
        if not inside:
            writer.text(plain, has_loss=False)
            return False
        if inside != [(min(inside[0][0], 0), max(inside[0][1], len(piece)))]:
            # positions in the text without marks
            before = np.concatenate([[0], np.cumsum([one != TEXT_MARK for one in piece])])
            inside = [(int(before[max(first, 0)]), int(before[min(stop, len(piece))])) for first, stop in inside]
            is_bare = [not _overlaps(first, stop, inside) for first, stop in self.offsets(plain)]
            bare += [(writer.num_parts_begun, first, count) for first, count in _runs(is_bare)]
        writer.text(plain, has_loss=True)
        return inside[-1][1] >= len(plain)

    def _losses(self, text: str, messages: list[dict[str, Any]], tools: list[Any] | None) -> list[tuple[int, int]]:
        """The characters that are trained on, in order; `text` is of all messages, without marks of generations."""
        found: list[tuple[int, int]] = []
        controls = [(start, stop, name) for start, stop, name in _found(self.names, text)]
        for number, message in enumerate(messages):
            if message["role"] not in self.loss:
                continue
            begin = _without_generations(self._text(messages[:number], tools))[0] if number else ""
            prompt = _without_generations(self._text(messages[:number], tools, prompts=True))[0] if number else begin
            if not text.startswith(begin):
                raise ValueError(
                    f"the template writes the messages before message {number} otherwise once that follows, so that "
                    f"it is not known where that begins; {_ENCLOSE}"
                )
            start = len(_common_start(text, prompt))
            whole = _without_generations(self._text(messages[: number + 1], tools))[0]
            if text.startswith(whole):
                stop = len(whole)
                ends = [last for first, last, _ in controls if start <= first and last <= stop]
                if ends and not text[ends[-1] : stop].strip():
                    stop = ends[-1]
            else:
                stop = next((last for first, last, name in controls if first >= start and name == self.end_of_turn), -1)
                if stop < 0:
                    raise ValueError(f"it is not known where the template ends message {number}; {_ENCLOSE}")
            found.append((start, stop))
        return found


def _message(held: Any) -> dict[str, Any]:
    """A message with role and content, without what is null; its reasoning has all names that templates read."""
    if not isinstance(held, dict):
        raise ValueError(f"it has a message that is a {type(held).__name__}, no mapping of role and content")
    message = {key: value for key, value in held.items() if value is not None}
    if "role" not in message and "from" in message:
        message = {"role": message.pop("from"), "content": message.pop("value", ""), **message}
        message["role"] = {"human": "user", "gpt": "assistant"}.get(message["role"], message["role"])
    if not isinstance(message.get("role"), str):
        raise ValueError(f"it has a message with the keys {', '.join(message) or 'none'}, and no role")
    reasoning = next((message[key] for key in ("reasoning_content", "thinking", "reasoning") if key in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _of_names(names: Mapping[str, object]) -> re.Pattern[str]:
    """Finds names in a text, longer ones first."""
    longest_first = sorted(names, key=lambda name: (-len(name), name))
    return re.compile(f"(?:{'|'.join(map(re.escape, longest_first)) or '(?!)'})(?!{TEXT_MARK})")


def _found(names: re.Pattern[str], text: str) -> list[tuple[int, int, str]]:
    return [(*found.span(), found[0]) for found in names.finditer(text)]


def _without_generations(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without marks of generations, and the characters that were between them."""
    found: list[tuple[int, int]] = []
    parts = re.split(f"([{_BEGIN}{_END}])", marked)
    place, begin = 0, 0
    for number, part in enumerate(parts):
        if number % 2 == 0:
            place += len(part)
        elif part == _BEGIN:
            begin = place
        else:
            found.append((begin, place))
    return "".join(parts[::2]), found


def _common_start(one: str, other: str) -> str:
    return next(
        (one[:at] for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(one, other, key=len),
    )


def _overlaps(start: int, stop: int, ranges: Sequence[tuple[int, int]]) -> bool:
    return any(first < stop and start < last for first, last in ranges)


def _runs(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """Where runs of true flags begin, and how many there are."""
    borders = np.flatnonzero(np.diff(np.asarray(flags, np.int8), prepend=0, append=0))
    return [(int(start), int(stop - start)) for start, stop in zip(borders[::2], borders[1::2], strict=True)]


# --- The recipe's words -> a cutter.


def open_template(
    source: str,
    chat: Chat,
    tokenizers: Tokenizers,
    *,
    tokenizer: str,
    markers: Mapping[str, str],
    tokens_of_items: Sequence[int],
) -> TemplateCutter:
    """The chat template of a file.

    Args:
        source: Its name, for errors.
        chat: What its recipe says.
        tokenizers: Opens its tokenizer.
        tokenizer: The recipe's words for it.
        markers: By kind, sorted, what stands for an item in a content.
        tokens_of_items: In the order of `markers`, the id that stands for an item.

    Raises:
        RecipeError: jinja2 is not installed, the template cannot be used, or the tokenizer is no tokenizer.json.
        SourceUnreadable: A file cannot be read.
    """
    where = f"sources.{source}.chat"
    assert chat.template is not None
    file = read_template(tokenizers.directory / chat.template, f"{where}.template")
    render = _compiled(file, f"{where}.template")
    control = tokenizers.control_tokens(source, tokenizer, f"{where}.template")
    tools = None
    if chat.tools is not None:
        try:
            tools = msgspec.json.decode(_text(tokenizers.directory / chat.tools, f"{where}.tools"))
        except msgspec.DecodeError as error:
            raise SourceUnreadable(f"{where}.tools: {chat.tools} is no JSON ({error})") from None
        if not isinstance(tools, list):
            raise SourceUnreadable(f"{where}.tools: {chat.tools} holds no list of tools")
    variables = {**file.tokens, **(chat.variables or {})}
    names = {name: [token.id, token.lstrip, token.rstrip] for name, token in control.items()}
    said = [file.text, names, variables, tools, list(markers.values()), _jinja_version()]
    cutter = TemplateCutter(
        template_id=hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16],
        render=render,
        control=control,
        names=_of_names(control),
        variables=variables,
        tools=tools,
        loss=chat.loss,
        markers=markers,
        places_of_items={
            name: tokens_of_items.index(token.id) for name, token in control.items() if token.id in tokens_of_items
        },
        end_of_turn=None,
        has_generations=re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", file.text) is not None,
        offsets=tokenizers.offsets(source, tokenizer),
    )
    return msgspec.structs.replace(cutter, end_of_turn=_end_of_turn(cutter, f"{where}.template"))


def _end_of_turn(cutter: TemplateCutter, where: str) -> str | None:
    """The token that ends a turn of the assistant, by a conversation of two messages.

    Raises:
        RecipeError: The template reads a clock.
    """
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    try:
        text, _ = _without_generations(cutter._text(messages, None))
    except SourceUnreadable as error:
        raise RecipeError(str(error), where) from None
    except ValueError:
        return None  # it wants other messages; rows will tell
    names = [name for start, _, name in _found(cutter.names, text) if start >= text.rfind("b")]
    return names[-1] if names else None


def clock_error(format: str) -> str:
    """What is said of a template that reads a clock."""
    return (
        f"the template asks for the date (strftime_now({format!r})), so that a row would have other tokens each day; "
        "give what it looks for by chat.variables, as date_string: 26 Jul 2024"
    )
