"""What an answer can be held to, and what is refused: with the reason, soon, and without harm to the process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxserve.request import RequestError, StructuredSpec, Thoughts
from jaxserve.structured import Grammars
from jaxserve.tokenizer import Tokenizer

TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


@pytest.fixture(scope="module", params=["tiny-llama-3.1", "tiny-llama-2"])
def grammars(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Grammars:
    return Grammars(lambda: Tokenizer.load(checkpoint(request.param)))


def spec(kind: Any, value: Any) -> StructuredSpec:
    return StructuredSpec(kind=kind, value=value if isinstance(value, str) else json.dumps(value), field="the field")


def accepts(grammars: Grammars, kind: str, value: Any, text: str) -> bool:
    """Whether the whole text may be the answer."""
    matcher = grammars.compile(spec(kind, value)).result()
    tokens = grammars._tokenizer.result().greedy_tokenize(text)
    return matcher.consume_tokens(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("kind", "value", "right", "wrong"),
    [
        ("json_object", "", '{"a": [1, {}]}', "[1]"),
        ("json", {"enum": ["北风", "Fjällräv", "🦊"]}, '"北风"', '"风"'),
        ("json", {"type": "object", "properties": {"größe": {"type": "null"}}}, '{"größe": null}', '{"größe": 1}'),
        ("json", True, "3.5", "a"),
        ("json", TREE, '{"value": 1, "children": [{"value": 2, "children": []}]}', '{"value": 1, "children": [2]}'),
        ("choice", ["yes", 'a "quoted"\\ line\n', "yes 🦊"], 'a "quoted"\\ line\n', "ye"),
        ("regex", r"\d{2}-[äö]+", "12-äö", "12-"),
        ("grammar", 'start: "x" DIGITS\nDIGITS: /[0-9]+/', "x12", "x"),
        ("grammar", 'root ::= "x" digit+\ndigit ::= [0-9]', "x12", "x"),
    ],
)
def test_so05_what_matches_is_accepted_and_nothing_else(grammars, kind, value, right, wrong):
    assert accepts(grammars, kind, value, right)
    assert not accepts(grammars, kind, value, wrong)


ANSWERS = [
    ("json", {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": False}, '{"a": 1}'),
    ("json_object", "", '{"a": [1]}'),
    ("regex", "x[0-9]{2}", "x12"),
    ("regex", "<(b|i)>", "<b>"),
    ("choice", ["yes", "no"], "yes"),
    ("grammar", 'start: "x" DIGITS\nDIGITS: /[0-9]{2}/', "x12"),
    ("grammar", 'root ::= "x" digit digit\ndigit ::= [0-9]', "x12"),
]


@pytest.mark.parametrize("tags", ["text", "special"])
@pytest.mark.parametrize(("kind", "value", "right"), ANSWERS)
def test_an_answer_may_or_must_come_after_thoughts(grammars, kind, value, right, tags):
    """Which may hold anything, pieces of the tags and of the answer too; the first end tag ends them."""
    tokenizer = grammars._tokenizer.result()
    if tags == "text":
        start, end = "<think>", "</think>"
        ids = {start: tokenizer.greedy_tokenize(start), end: tokenizer.greedy_tokenize(end)}
    else:
        start, end = [token for token in range(tokenizer.vocab_size) if tokenizer.is_special_token(token)][:2]
        ids = {start: [start], end: [end]}

    def accepted(*parts: str | int, opened: bool) -> bool:
        thoughts = Thoughts(start=start, end=end, open=opened)
        matcher = grammars.compile(msgspec.structs.replace(spec(kind, value), thoughts=thoughts)).result()
        tokens = [token for part in parts for token in ids.get(part) or tokenizer.greedy_tokenize(part)]
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    for thought in ("Hm.", "\n<think {\nyes </thin x12", ""):
        for white in ("", "\n\n"):
            assert accepted(thought, end, white, right, opened=True)
            assert accepted(white, start, thought, end, white, right, opened=True)
            assert accepted(white, start, thought, end, white, right, opened=False)
    assert accepted(right, opened=False) and not accepted(right, opened=True)
    assert not accepted("Hm.", end, right, opened=False)
    for opened in (True, False):
        assert not accepted(start, right, opened=opened)
        assert not accepted(start, "Hm.", end, "Hm.", opened=opened)
        assert not accepted(start, "Hm.", end, right[:-1], opened=opened)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (TREE, '{"value":1,"children":[{"value":2}]}'),
        ({"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False}, '{"child":{}}'),
        ({"properties": {"a": {"items": {"type": "null"}}, "c": {"$ref": "#/properties/a/items"}}}, '{"c":null}'),
    ],
    ids=["tree", "itself", "pointer"],
)  # fmt: skip
def test_so03_recursive_and_pointer_references_work(grammars, schema, text):
    assert accepts(grammars, "json", schema, text)
    assert not accepts(grammars, "json", schema, text.replace("null", "1").replace("{}", "1").replace("2", "null"))


def chain(count: int, step: str) -> str:
    """A schema of references to references; ``step`` is what one of them is, with the next one's place in it."""
    definitions = ",".join(f'"{i}":{step % (i + 1)}' for i in range(count))
    return f'{{"$defs":{{{definitions},"{count}":{{"type":"null"}}}},"$ref":"#/$defs/0"}}'


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("json", {"$ref": "#"}, "no text can match"),
        ("json", {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "no text"),
        ("json", {"anyOf": [{"$ref": "#"}]}, "no text can match"),
        ("json", {"$ref": "#/$defs/none"}, "does not exist"),
        ("json", {"$ref": "http://example.com/schema"}, "example.com"),
        ("json", {"type": "nothing"}, "nothing"),
        ("json", {"type": "array", "uniqueItems": True}, "uniqueItems"),
        ("json", {"type": "string", "pattern": "(?=a)"}, "look-around"),
        ("json", {"type": "string", "pattern": "a?" * 4001}, "8000 characters together"),
        ("json", '{"items":' * 200 + "true" + "}" * 200, "recursion"),
        ("json", " " * 100_000 + "true", "100000 characters, got 100004"),
        ("json", "{", "JSON Schema cannot be used"),
        ("json", {"allOf": [{"type": "string", "pattern": f".*a{i}.*"} for i in range(20)]}, "8 patterns for the same"),
        ("grammar", "start: T\nT: " + " & ".join(f"/.*a{i}.*/" for i in range(20)), "8 patterns for the same"),
        ("regex", "(", "unclosed"),
        ("regex", "a" * 8001, "8000"),
        ("grammar", "start: unknown", "unknown"),
        ("grammar", "root ::= (", "grammar cannot be used"),
        ("grammar", "root ::= " + "(" * 9000 + '"a"' + ")" * 9000, "grammar cannot be used"),
        ("grammar", "start: start", "no text can match"),
        ("choice", ["x" * 100_000], "100000"),
    ],
)
def test_so03_what_cannot_be_is_refused_with_the_field_and_the_reason(grammars, kind, value, reason):
    start = time.monotonic()
    with pytest.raises(RequestError, match=reason) as caught:
        grammars.compile(spec(kind, value)).result()
    assert caught.value.param == "the field" and str(caught.value).startswith("the field")
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json", chain(3200, '{"$ref":"#/$defs/%d"}')),
        ("json", chain(1600, '{"properties":{"a":{"$ref":"#/$defs/%d"}}}')),
        ("json", chain(1700, '{"anyOf":[{"$ref":"#/$defs/%d"},{"type":"null"}]}')),
        ("json", chain(1700, '{"allOf":[{"$ref":"#/$defs/%d"},{}]}')),
        ("grammar", "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(2200)) + '\nr2200: "a"'),
        ("regex", "a?" * 4000),
        ("choice", [f"choice {i}" for i in range(6000)]),
    ],
    ids=["references", "properties", "anyOf", "allOf", "rules", "regex", "choices"],
)
def test_so03_the_largest_and_deepest_take_bounded_time_and_the_process_survives(grammars, kind, value):
    start = time.monotonic()
    grammars.compile(spec(kind, value)).result()
    assert time.monotonic() - start < 10


def test_what_was_compiled_is_kept_and_answers_do_not_share_their_state(grammars):
    wanted = spec("choice", ["ab", "cd"])
    first = grammars.compile(wanted).result()
    kept = grammars._cache[wanted]
    assert first.consume_tokens(grammars._tokenizer.result().greedy_tokenize("ab")) and first.is_stopped()
    second = grammars.compile(wanted).result()
    assert grammars._cache[wanted] is kept and not second.is_stopped()
    for number in range(100):
        grammars.compile(spec("regex", f"a{{{number}}}b")).result()
    assert wanted not in grammars._cache and len(grammars._cache) == 32
