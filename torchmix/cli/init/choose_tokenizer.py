"""The tokenizer of text, given or asked for, as keys of a recipe.

In: what the user said, or answers on a terminal. Out: the tokenizer, and the keys `tokenizer` and `end_id`. Must hold:
it is never guessed; a vocabulary is opened, so that a wrong one is an error before anything is written. Cost: reading
the vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from torchmix.cli.init.recipe_yaml import relative_path, text_of
from torchmix.errors import OptionError, RecipeError, SourceUnreadable
from torchmix.recipe.source.tokenizer_kind import tokenizer_kind
from torchmix.transform.open_tokenizer import Tokenizers

TOKENIZERS = "bytes, tiktoken:NAME, or the path of a tokenizer.json"
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
    if not given or tokenizer_kind(given) is None:
        what = f"--tokenizer {given}: no tokenizer" if given else "text needs --tokenizer"
        near = "" if not given or "/" in given else f" (did you mean tiktoken:{given}?)"
        raise OptionError(f"{what}{near}; give {TOKENIZERS}")
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
