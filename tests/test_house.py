"""The house: files are named for one idea, each says in a line what it is for, and each name means one thing."""

from __future__ import annotations

import ast
import re

from tests.test_fences import FILES, module_of, nodes, place, room_of, trees

BANNED_STEMS = {"util", "utils", "common", "helper", "helpers", "base", "manager", "misc", "core"}


def test_files_are_named_for_an_idea() -> None:
    faults = [
        f"{place(path)} is named for no idea"
        for path in FILES
        if path.stem in BANNED_STEMS or path.parent.name in BANNED_STEMS
    ]
    assert not faults, "\n".join(faults)


def test_every_file_says_what_it_is_for() -> None:
    faults = []
    for path, tree in trees().items():
        if not ast.get_docstring(tree):
            faults.append(f"{place(path)} has no docstring")
        futures = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
        if path.name != "__init__.py" and not futures:
            faults.append(f"{place(path)} lacks `from __future__ import annotations`")
    assert not faults, "\n".join(faults)


def test_a_class_name_stands_once() -> None:
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(place(path, node))
    faults = [f"{name}: {', '.join(found)}; rename the lesser one" for name, found in places.items() if len(found) > 1]
    assert not faults, "\n".join(faults)


def test_array_types_have_their_names_in_one_file() -> None:
    faults = [
        f"{place(path, node)} {ast.unparse(node)}; torchmix/array_types.py has a name for it"
        for path, tree in trees().items()
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.value) in ("NDArray[np.int32]", "NDArray[np.int64]")
        if path.name != "array_types.py"
    ]
    assert not faults, "\n".join(faults)


def test_functions_say_what_they_do_not_that_they_do() -> None:
    vague = re.compile(r"_*(get|process|handle|do)(_(?!GET$)|$)")  # http.server calls do_GET
    faults = [
        f"{place(path, node)} {node.name}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef)
        and vague.match(node.name)
        and room_of(module_of(path)) != "megatron_adapter"
    ]
    assert not faults, "\n".join(faults)


def test_docstrings_are_sentences_or_nouns() -> None:
    """A genitive without its noun, and words of another century, are read twice."""
    odd = re.compile(r"^Of |\b(anew|oftener|dear)\b")
    faults = [
        f"{place(path, node)} {node.value.value.strip().splitlines()[0]!r}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if odd.search(node.value.value.strip())
    ]
    assert not faults, "\n".join(faults)


def test_types_of_messages_are_known_before_threads_decode_them() -> None:
    """msgspec learns of a class at its first decode, and two threads that do so at once can crash the process."""
    faults = [
        f"{place(path, node)} {ast.unparse(node)}; make a Decoder beside the function, at the import"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("msgspec.json.decode", "msgspec.msgpack.decode")
        for word in node.keywords
        if word.arg == "type" and isinstance(word.value, ast.Name)
    ]
    assert not faults, "\n".join(faults)
