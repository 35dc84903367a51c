from __future__ import annotations

import json
import re

import pytest

from tests.support.files import random_texts, random_tokens
from tests.support.json_lines import json_lines, plain_lines
from torchmix.formats.jsonl.lines import LineFault, LineParser, whole_lines


def texts(content: bytes, column: str = "text") -> list[str | None]:
    return LineParser(column, "text").parse(content).to_pylist()


def tokens(content: bytes, column: str = "text") -> list[list[int]]:
    return LineParser(column, "tokens").parse(content).to_pylist()


def fault(content: bytes, column: str = "text", kind: str = "text") -> tuple[int, int, bool, str]:
    with pytest.raises(LineFault) as caught:
        LineParser(column, kind).parse(content)
    return caught.value.line, caught.value.offset, caught.value.is_json, str(caught.value)


@pytest.mark.parametrize("seed", range(8))
def test_values_are_those_of_json_loads_whatever_lies_between_objects(seed):
    documents = [None if i % 7 == 3 else text for i, text in enumerate(random_texts(seed, 60))]
    content = json_lines(documents, seed=seed)
    assert [json.loads(line)["text"] for line in content.splitlines() if line.strip()] == documents
    assert texts(content) == documents
    lists = [None if i % 5 == 3 else ids for i, ids in enumerate(random_tokens(seed, 60))]
    assert tokens(json_lines(lists, seed=seed)) == [ids or [] for ids in lists]


def test_no_lines_and_blank_lines_are_no_documents():
    assert texts(b"") == texts(b"\n") == texts(b" \r\n\n\t\n") == tokens(b"") == []
    assert texts(b'\n\n{"text":"a"}\n \n{"text":"b"}') == ["a", "b"]


def test_a_key_may_lie_in_an_object_and_a_null_there_is_a_null():
    content = b'{"a":{"b":{"c":"x"}}}\n{"a":null}\n{"a":{"b":null}}\n{"a":{"b":{"c":null}}}\n'
    assert texts(content, "a.b.c") == ["x", None, None, None]
    assert tokens(content.replace(b'"x"', b"[1,2]"), "a.b.c") == [[1, 2], [], [], []]
    assert fault(content + b'{"a":{}}\n', "a.b.c")[:3] == (4, 73, True)


def test_of_a_key_that_stands_twice_the_last_one_counts_as_in_python():
    line = b'{"text":"a","text":"b"}'
    assert texts(line) == [json.loads(line)["text"]] == ["b"]


def test_escapes_and_long_integers():
    assert texts(b'{"te\\u0078t":"\\ud83d\\ude42\\u0000\\n"}') == ["🙂\0\n"]
    assert tokens(b'{"text": [ -9223372036854775808 , 9223372036854775807, -0 ]}') == [[-(2**63), 2**63 - 1, 0]]


@pytest.mark.parametrize(
    "text",
    [
        "\ud83d",
        "a\ud83d",
        "\ud83dz",
        "\ude42 second alone",
        "\ud83d\ud83d\ude42\ude42",
        "🙂\udbff",
        "\\\ud83d",
        "\\ud83d is no escape",
        "\\\\ud83d",
        '"\ud83d"',
        "\udc00\ud800",
    ],
)
def test_11_8_half_of_a_surrogate_pair_is_the_replacement_character_in_any_key(text):
    meant = re.sub("[\ud800-\udfff]", "�", json.loads(json.dumps(text)))
    line = json.dumps({"text": text, "n": [7]}).encode() + b"\n"
    assert texts(line) == [meant]
    unread = json.dumps({text: text, "text": "🙂", "more": {"of": [text]}, "n": [7]}).encode()
    assert texts(GOOD + unread) == ["good", "🙂"]
    assert tokens(line + unread, "n") == [[7], [7]]
    upper = line.replace(b"\\ud83d", b"\\uD83D").replace(b"\\ude42", b"\\uDE42")
    assert texts(upper) == [re.sub("[\ud800-\udfff]", "�", json.loads(upper)["text"])]
    assert fault(line + GOOD + b'{"txt":1}\n')[:2] == (2, len(line + GOOD)), "places are those of the file"
    found = {}
    both = LineParser("text", "text").parse(line + b"{\n" + line, found).to_pylist()
    assert (both, list(found)) == ([meant, None, meant], [1])


GOOD = b'{"text":"good"}\n'


@pytest.mark.parametrize(
    ("line", "is_json", "says"),
    [
        (b'{"txt":"a"}', True, "missing required field `text`"),
        (b'{"text":1}', True, "Expected `str | null`, got `int`"),
        (b'{"text":["a"]}', True, "got `array`"),
        (b'"text"', True, "Expected `object`, got `str`"),
        (b"null", True, "Expected `object`, got `null`"),
        (b'{"text":"a"}{"text":"b"}', False, "trailing characters"),
        (b'{"text":"a"},', False, "trailing characters"),
        (b'{"text":"a"', False, "truncated"),
        (b'{"text":"a","score":NaN}', False, "invalid character"),
        (b'{"text":"a\tb"}', False, "invalid character"),
        (b'{"text":"\xff"}', False, "not UTF-8: invalid start byte"),
        (b'{"text":"\\ud80"}', False, ""),
        (b'\xef\xbb\xbf{"text":"a"}', False, "invalid character"),
        (b"\x1f\x8b\x08\x00", False, r"compressed.* name the file .jsonl.gz"),
        ('{"text":"a"}'.encode("utf-16-le"), False, "UTF-16"),
        (b"[", True, r"jq -c '\.\[\]'"),
        (b"{", False, "must not go over several lines"),
        (b'{"text":"a","deep":' + b"[" * 200_000 + b"]" * 200_000 + b"}", False, "nested too deeply"),
        (b'{"text":"a","deep":' + b'{"a":' * 200_000 + b"1" + b"}" * 200_001, False, "nested too deeply"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_line_at_fault_is_named_with_its_place(line, is_json, says):
    for before, after in [(b"", b""), (GOOD * 3, GOOD), (b"\n \n" + GOOD, b"\n" + GOOD)]:
        number, offset, json_too, message = fault(before + line + b"\n" + after)
        assert (number, offset, json_too) == (before.count(b"\n"), len(before), is_json)
        assert re.search(says, message)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (b"[1,2.0]", r"Expected `int`, got `float` - at `\$.text\[1\]`"),
        (b"[1,null]", r"got `null` - at `\$.text\[1\]`"),
        (b"[true]", "got `bool`"),
        (b'["1"]', "got `str`"),
        (b"[[1]]", "got `array`"),
        (b'"a"', "Expected `array | null`, got `str`"),
        (b"[9223372036854775808]", "does not fit 64 bits"),
        (b"[-9223372036854775809]", "does not fit 64 bits"),
    ],
)
def test_a_list_holds_integers_of_64_bits_alone(value, says):
    number, offset, is_json, message = fault(b'{"text":[1]}\n{"text":' + value + b"}\n", kind="tokens")
    assert (number, offset, is_json) == (1, 13, True)
    assert re.search(says, message)


def test_an_object_over_two_lines_is_refused_although_the_number_of_objects_is_right():
    # two objects on a line and one on two: three of each, and a decoder of many objects takes them all
    assert fault(b'{"text":"a"}{"text":"b"}\n{"text":\n"c"}\n')[:2] == (0, 0)
    assert fault(b'{"text":"a"}\n{"text":{"x":{}\n}}\n{"text":"b"}')[:2] == (1, 13)
    assert fault(b'{"text":"a"}{"text":"b"}\n\n')[:2] == (0, 0)


def test_whole_lines_are_the_first_ones_that_are_not_blank():
    content = b'\n{"a":1}\n \n{"b":2}\n\n{"c":'
    assert whole_lines(content, 0) == b""
    assert whole_lines(content, 1) == b'\n{"a":1}\n'
    assert whole_lines(content, 2) == b'\n{"a":1}\n \n{"b":2}\n'
    assert whole_lines(content, 3) == whole_lines(content, 9) == content


def test_memory_is_read_where_it_lies():
    content = plain_lines(["a", "b"])
    assert LineParser("text", "text").parse(memoryview(b"xx" + content)[2:]).to_pylist() == ["a", "b"]
    assert LineParser("text", "text").parse(memoryview(b"\n" + content)).to_pylist() == ["a", "b"]
