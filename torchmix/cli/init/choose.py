"""The tokenizer of text, and the items of a source with the tokens that stand for them, as keys of a recipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path

from torchmix.cli.init.recipe_yaml import relative_path, text_of
from torchmix.errors import OptionError, RecipeError, SourceUnreadable
from torchmix.formats.source import FoundColumn
from torchmix.modalities.table import kind_named
from torchmix.recipe.build import nearest
from torchmix.recipe.items import key_of_items, option_of_items
from torchmix.recipe.sources import tokenizer_kind
from torchmix.storage.stores import is_uri
from torchmix.transform.bytes_tokenizer import END_OF_DOCUMENT
from torchmix.transform.documents.chat_template import CONFIG, read_template
from torchmix.transform.open_tokenizer import Tokenizers

# --- The tokenizer of text, given or asked for, as keys of a recipe.
#
# It is never guessed; a vocabulary is opened, so that a wrong one is an error before anything is written. Cost:
# reading the vocabulary.

TOKENIZERS = "bytes, tiktoken:NAME, or the path of a tokenizer.json or of its folder"
USUAL_ENDS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")


def choose_tokenizer(given: str | None, names: Sequence[str]) -> str:
    """The tokenizer of some sources of text: the one that is given, or what the user answers.

    Raises:
        OptionError: None is given, and nobody can be asked; or it is none.
    """
    if given is None and sys.stdin.isatty() and sys.stderr.isatty():
        print(f"{', '.join(names)}: text, which needs a tokenizer: {TOKENIZERS}", file=sys.stderr)
        print("tokenizer: ", end="", file=sys.stderr, flush=True)
        given = sys.stdin.readline().strip()
    if given and (Path(given) / "tokenizer.json").is_file():  # the folder of a model
        return (Path(given) / "tokenizer.json").as_posix()
    if not given or tokenizer_kind(given) is None:
        what = f"--tokenizer {given}: no tokenizer" if given else "text needs --tokenizer"
        near = "" if not given or "/" in given else f" (did you mean tiktoken:{given}?)"
        hub = " (of a model on the hub, download the file first)" if given and given.count("/") == 1 else ""
        raise OptionError(f"{what}{near}{hub}; give {TOKENIZERS}")
    return given


def tokens_among(tokenizer: str, names: Iterable[str]) -> set[str]:
    """Those names that are tokens of a vocabulary that opens; `bytes` has none."""
    if tokenizer_kind(tokenizer) == "bytes":
        return set()
    opened, found = Tokenizers(Path.cwd()), set[str]()
    for name in names:
        try:
            opened.token_id("", tokenizer, name, "")
            found.add(name)
        except RecipeError:
            continue
    return found


def tokenizer_keys(tokenizer: str, end_id: str | None, target: Path) -> tuple[tuple[str, str], ...]:
    """The keys of a source that make ids of its text, as YAML has their values.

    Args:
        tokenizer: As a recipe names it; a path is relative to the present folder.
        end_id: The token after each text; None to look for one that is usual.
        target: The recipe's file, which its paths are relative to.

    Raises:
        OptionError: A package is missing, or the vocabulary lacks the token.
        SourceUnreadable: The vocabulary cannot be read.
    """
    kind = tokenizer_kind(tokenizer)
    if kind == "bytes":
        if end_id is not None:
            raise OptionError("--end-id: bytes ends each document with 256 by itself")
        return (("tokenizer", "bytes"),)
    opened = Tokenizers(Path.cwd())
    ends = USUAL_ENDS if end_id is None else (end_id,)
    end: str | int | None = None
    for name in ends:
        try:
            end = int(name) if name.isdigit() else name
            opened.open("", tokenizer, end_id=end)
            break
        except RecipeError as error:
            if error.where != "sources..end_id":
                raise OptionError(f"--tokenizer {tokenizer}: {error.message}") from None
            if end_id is not None:
                raise OptionError(f"--end-id {end_id}: {error.message}") from None
            end = None
        except SourceUnreadable as error:
            message = str(error).removeprefix("sources..tokenizer: ")
            raise SourceUnreadable(f"--tokenizer {tokenizer}: {message}") from None
    path = relative_path(tokenizer, target, tokenizer) if kind == "file" else tokenizer
    keys = (("tokenizer", text_of(path)),)
    return keys if end is None else (*keys, ("end_id", str(end) if isinstance(end, int) else text_of(end)))


CHATML = ("<|im_start|>", "<|im_end|>")


def chat_template(tokenizer: str, target: Path, *, has_items: bool) -> str:
    """The template of conversations, as YAML has it: that of the model whose vocabulary it is, where no items stand in
    messages; else one whose tokens the vocabulary has."""
    if tokenizer_kind(tokenizer) == "file" and not has_items:
        try:
            path = Path.cwd() / tokenizer
            read_template(path.with_name(CONFIG), "")
            return text_of(relative_path(str(Path(tokenizer).with_name(CONFIG)), target, tokenizer))
        except SourceUnreadable:
            pass  # a vocabulary alone
    return "chatml" if tokens_among(tokenizer, CHATML) == set(CHATML) else "plain"


# --- The items of a source, such as images, and the tokens that stand for them, as keys of a recipe.
#
# A token is one that the tokenizer has; what cannot be known, as where paths begin, is said. Cost: reading the
# vocabulary.

ItemTokens = tuple[tuple[str, str], ...]
"""`token`, `before` and `after`, as far as there are some, as YAML has their values."""


def choose_items(columns: Sequence[FoundColumn], kind: str, file: str, wanted: str | None) -> FoundColumn | None:
    """The column of a kind of items that is meant; None where there is none.

    Raises:
        SourceUnreadable: The one that the user named is not there.
        OptionError: There are several.
    """
    found = [column for column in columns if column.items == kind]
    names = [column.name for column in found]
    if wanted is not None and found:
        chosen = next((column for column in found if column.name == wanted), None)
        if chosen is None:
            raise SourceUnreadable(f"{file} has no {kind}s in {wanted!r}{nearest(wanted, names)}; {_held(found)}")
        return chosen
    usual = [column for name in kind_named(kind).draft.columns for column in found if column.name == name]
    if len(found) > 1 and not usual:
        option = option_of_items(kind)
        raise OptionError(f"{file} has {kind}s in {', '.join(names)}; say which with --{option} COLUMN")
    return next(iter(usual or found), None)


def item_tokens(tokenizer: str, given: Mapping[str, str | None]) -> dict[str, ItemTokens]:
    """What stands for items of some kinds, by kind.

    Args:
        tokenizer: As a recipe names it.
        given: By kind, the token that the user names; None to look for one that is usual.

    Raises:
        OptionError: The tokenizer has none that is usual, and none is given; or not the one that is.
    """
    found: dict[str, ItemTokens] = {}
    for kind, token in given.items():
        taken = {tokens[0][1] for tokens in found.values()}
        found[kind] = _tokens(tokenizer, kind, token, taken)
    return found


def _tokens(tokenizer: str, kind: str, given: str | None, taken: Collection[str]) -> ItemTokens:
    """Those of a kind; `taken` stand for others."""
    option = f"--{kind}-token"
    if tokenizer_kind(tokenizer) == "bytes":
        if given is not None and not (given.isdigit() and int(given) > END_OF_DOCUMENT):
            raise OptionError(f"{option} {given}: with bytes it is a number above {END_OF_DOCUMENT}")
        free = next(str(token) for token in count(END_OF_DOCUMENT + 1) if str(token) not in taken)
        return (("token", given or free),)
    if given is not None:
        token = int(given) if given.isdigit() else given
        try:
            Tokenizers(Path.cwd()).token_id("", tokenizer, token, "")
        except RecipeError as error:
            raise OptionError(f"{option} {given}: {error.message}") from None
        return (("token", given if isinstance(token, int) else text_of(given)),)
    usual = kind_named(kind).draft.tokens
    known = tokens_among(tokenizer, (word for words in usual for word in words))
    for words in usual:
        if words[0] in known and text_of(words[0]) not in taken:
            keys = zip(("token", "before", "after"), words, strict=False)
            return tuple((key, text_of(word)) for key, word in keys if word in known)
    tried = f" ({', '.join(words[0] for words in usual)})" if usual else ""
    raise OptionError(
        f"--tokenizer {tokenizer} has no token that usually stands for {kind}s{tried}; "
        f"name one with {option} TOKEN, a name or an id of the tokenizer"
    )


def item_keys(column: FoundColumn, file: str, tokens: ItemTokens, target: Path, words: str) -> tuple[str, str]:
    """The options of a source's items of one kind, and what to say of them.

    Args:
        column: The column of items, or of paths.
        file: In which it is.
        tokens: The tokens of `item_tokens`.
        target: The recipe's file, which its paths are relative to.
        words: The words of the user, which tell whether paths are absolute.
    """
    keys = [("column", text_of(column.name))]
    draft = kind_named(column.items).draft
    note = draft.note
    if column.kind == "item paths":
        folder, is_there = _folder(column, file)
        keys.append(("folder", text_of(relative_path(folder, target, words) if folder else ".")))
        if not is_there:
            where = f"{key_of_items(column.items)}.folder"
            note = f"{where}: write where paths such as {column.example} begin, which was not found"
    keys += [*tokens, *draft.options]
    return "{" + ", ".join(f"{key}: {value}" for key, value in keys) + "}", note


def _folder(column: FoundColumn, file: str) -> tuple[str, bool]:
    """The folder that the paths of a column begin in, and whether it was found."""
    example, kind = column.example, column.items
    near = os.path.dirname(file)  # noqa: PTH120 - a URI may be no path
    if is_uri(file) or is_uri(example):
        return near, False
    if Path(example).is_absolute():
        return "/", Path(example).exists()
    up = os.path.dirname(near)  # noqa: PTH120
    for folder in (near, f"{near}/{kind}s", f"{near}/{kind}", up, f"{up}/{kind}s"):
        if (Path(folder) / example).exists():
            return folder, True
    return near, False


def _held(found: Sequence[FoundColumn]) -> str:
    return "it has " + ", ".join(f"{column.name} ({column.kind})" for column in found)
