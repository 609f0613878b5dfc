"""Tool parsers alone: what each format comes to, however its text is cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve import config
from jaxserve.server.tool_parsers import PARSERS, CallDelta, NamedParser, Piece, RequiredParser, ToolParser

NAMES = ("get_weather", "add")
Answer = tuple[str, list[tuple[str, str]]]


def collect(pieces: list[Piece]) -> Answer:
    """Content, and name and arguments of each call."""
    content, calls = "", []
    for piece in pieces:
        if isinstance(piece, str):
            assert piece
            content += piece
        elif piece.name is not None:
            assert piece.index == len(calls)
            calls.append((piece.name, piece.arguments))
        else:
            name, arguments = calls[piece.index]
            calls[piece.index] = (name, arguments + piece.arguments)
    return content, calls


def parse(kind: str | type[ToolParser], *texts: str) -> Answer:
    parser = (PARSERS[kind] if isinstance(kind, str) else kind)(NAMES)
    pieces: list[Piece] = []
    for text in texts:
        pieces += parser.feed(text)
    return collect(pieces + parser.finish())


def test_the_flag_knows_all_parsers() -> None:
    assert set(config.TOOL_PARSERS) == set(PARSERS)


@pytest.mark.parametrize(
    ("kind", "text", "content", "calls"),
    [
        ("hermes", "Hello.", "Hello.", []),
        ("hermes", "Hello \n", "Hello \n", []),
        ("hermes", 'A\n<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>', "A", [("add", '{"x": 1}')]),
        (
            "hermes",
            '<tool_call>{"name":"add","arguments":{}}</tool_call>\n'
            '<tool_call>{"arguments":{"a":[1]},"name":"f"}</tool_call> B ',
            "B ",
            [("add", "{}"), ("f", '{"a": [1]}')],
        ),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
        ("hermes", '<tool_call>{"id": 5, "name": "add", "arguments": {}, "x": [{}]}</tool_call>', "", [("add", "{}")]),
        ("hermes", "a < b <tool_cal> <tool_call>no</tool_call>", "a < b <tool_cal> <tool_call>no</tool_call>", []),
        ("hermes", '<tool_call>{"name": "add", "arguments": 5}', '<tool_call>{"name": "add", "arguments": 5}', []),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>', []),
        ("hermes", '<tool_call><tool_call>{"name": "add"}</tool_call>', "<tool_call>", [("add", "{}")]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"x": tru!', "!", [("add", '{"x": tru')]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"x": "a\nb"}}', "", [("add", '{"x": "a\\nb"}')]),
        ("hermes", '<tool_call>{"name": "ad', '<tool_call>{"name": "ad', []),
        ("llama3_json", '{"name": "add", "parameters": {"x": 1}}', "", [("add", '{"x": 1}')]),
        ("llama3_json", ' <|python_tag|>{"type": "function", "name": "add", "parameters": {}}', "", [("add", "{}")]),
        (
            "llama3_json",
            '{"name": "add", "parameters": {}}; {"name": "get_weather", "parameters": {"c": "é"}}',
            "",
            [("add", "{}"), ("get_weather", '{"c": "é"}')],
        ),
        ("llama3_json", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
        ("llama3_json", '{"name": "add"}', '{"name": "add"}', []),
        ("llama3_json", 'Hi {"name": "add", "parameters": {}}', 'Hi {"name": "add", "parameters": {}}', []),
        ("llama3_json", '{"name": "add", "parameters": {}} Done.', "Done.", [("add", "{}")]),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"x": 1}}, {"name": "f", "arguments": {}}]', "",
         [("add", '{"x": 1}'), ("f", "{}")]),
        ("mistral", 'Hm.[TOOL_CALLS]add[ARGS]{"x": 1}[TOOL_CALLS]f{}', "Hm.", [("add", '{"x": 1}'), ("f", "{}")]),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"x": 1}', "", [("add", '{"x": 1}')]),
        ("mistral", "[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
        ("pythonic", "[add(x=1, y=[2.5, {'a': None}], z=true)]", "",
         [("add", '{"x": 1, "y": [2.5, {"a": null}], "z": true}')]),
        ("pythonic", "[add(), get_weather(city='Orléans (\\'45)')]", "",
         [("add", "{}"), ("get_weather", '{"city": "Orléans (\'45)"}')]),
        ("pythonic", "[1, 2]", "[1, 2]", []),
        ("pythonic", "[add(1)]", "[add(1)]", []),
        ("pythonic", "[add(x=open('f'))]", "[add(x=open('f'))]", []),
        ("pythonic", "[add(x=1", "[add(x=1", []),
        ("pythonic", "[add(x=1)] Done.", "Done.", [("add", '{"x": 1}')]),
        (RequiredParser, '[{"name": "add", "parameters": {"x": 1}}, {"name": "add", "parameters": {}}]', "",
         [("add", '{"x": 1}'), ("add", "{}")]),
        (RequiredParser, ' [{"name": "ad', "", []),
        (RequiredParser, '[{"name": "add", "parameters": {}}, {"na', "", [("add", "{}")]),
    ],
)  # fmt: skip
def test_what_a_text_comes_to(kind: Any, text: str, content: str, calls: Any) -> None:
    assert parse(kind, text) == parse(kind, *text) == (content, calls)


def test_the_arguments_of_the_one_function() -> None:
    parser = NamedParser(["add"])
    assert collect(parser.feed('{"x": ') + parser.feed("1}") + parser.finish()) == ("", [("add", '{"x": 1}')])
    assert not parser.in_call


def test_arguments_are_not_held_back() -> None:
    parser = PARSERS["hermes"](NAMES)
    parser.feed('<tool_call>{"name": "add", "arguments": ')
    for char in '{"x": "long':
        assert collect_arguments(parser.feed(char)) == char
    assert parser.in_call and parser.num_calls == 1


def collect_arguments(pieces: list[Piece]) -> str:
    return "".join(piece.arguments for piece in pieces if isinstance(piece, CallDelta))


def test_nesting_is_bounded() -> None:
    text = '<tool_call>{"name": "add", "x": ' + "[" * 100_000
    assert parse("hermes", text) == (text, [])
    assert parse("pythonic", "[add(x=" + "[" * 90_000 + "]" * 90_000 + ")]")[1] == []


def test_ids_of_calls() -> None:
    assert len({PARSERS["hermes"].new_call_id() for _ in range(100)}) == 100
    assert all(len(PARSERS["mistral"].new_call_id()) == 9 for _ in range(10))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.sampled_from(["x", "y", "city"]), values, max_size=3)
calls = st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3)


def written(kind: str, calls: list[tuple[str, Any]], ensure_ascii: bool) -> str:
    def dump(value: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii)

    match kind:
        case "hermes":
            return "\n".join(
                f'<tool_call>\n{{"name": {dump(name)}, "arguments": {dump(args)}}}\n</tool_call>'
                for name, args in calls
            )
        case "llama3_json":
            return "; ".join(f'{{"name": {dump(name)}, "parameters": {dump(args)}}}' for name, args in calls)
        case "mistral":
            return "[TOOL_CALLS]" + dump([{"name": name, "arguments": args} for name, args in calls])
    parts = (", ".join(f"{key}={value!r}" for key, value in args.items()) for _, args in calls)
    return "[" + ", ".join(f"{name}({part})" for (name, _), part in zip(calls, parts, strict=True)) + "]"


@pytest.mark.parametrize("kind", PARSERS)
@settings(max_examples=60, deadline=None)
@given(calls=calls, ascii=st.booleans(), data=st.data())
def test_tc01_any_cut_gives_the_calls_whole(kind: str, calls: Any, ascii: bool, data: st.DataObject) -> None:
    text = written(kind, calls, ascii)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)) | {0, len(text)})
    content, found = parse(kind, *(text[a:b] for a, b in itertools.pairwise(cuts)))
    assert content == ""
    assert [(name, json.loads(args)) for name, args in found] == calls
    assert (content, found) == parse(kind, text)


FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "[", "]", "{", "}", '"', "'"),
    *("(", ")", ":", ",", ";", "\\", " ", "\n", "name", '"name"', '"arguments"', '"parameters"', "add", "x=1", "1"),
    *('{"name": "add", "arguments": {"x": 1}}', "add(x='a')", "é", "true"),
)  # fmt: skip


@pytest.mark.parametrize("kind", [*PARSERS.values(), RequiredParser])
@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=12), data=st.data())
def test_tc01_no_text_is_lost_and_no_cut_shows(kind: Any, parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    whole = parse(kind, text)
    assert parse(kind, *text) == parse(kind, *parts) == whole
    content, found = whole
    if not found:
        assert content == text or (kind.forced and content == "")
    for _, args in found:  # what was said is what was written, layout apart
        assert kind is PARSERS["pythonic"] or "".join(args.split()) in "".join(text.split()) + "{}"
