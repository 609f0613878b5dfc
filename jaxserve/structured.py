"""Structured output: what an answer's text must match, compiled by llguidance to what may come next.

The process of ``server.grammar_process`` compiles to refuse what cannot be, the engine to know which tokens may come:
both by the same code, so that nothing reaches the engine that it cannot compile.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

from jaxserve.request import RequestError, StructuredSpec, Thoughts
from jaxserve.tokenizer import Tokenizer

MAX_CHARACTERS = {"json": 100_000, "choice": 100_000, "grammar": 32_000, "regex": 8_000}
"""Compiling takes stack in proportion to these and time up to their square, which at these sizes is a few seconds."""
STACK_BYTES = 256 * 2**20
"""Of address space. The compiler recurses: 100,000 characters of references to references were seen to take between 8
and 64 MiB, and without them the process ends."""
CACHED = 32
WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Between the parts of JSON. Without a limit, some models never stop."""
MAX_REASON = 300
MAX_INTERSECTED = 8
"""Patterns that one text must match together: whether that is possible at all takes exponential time to find out."""
LIMITS = LLParserLimits(verbose_errors=False, max_lexer_states=50_000)

type _Task = tuple[Future[Any], Callable[[], Any]] | None


class Grammars:
    """Compiles specifications, one at a time, in a thread of its own; those used last are kept."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab_size: int | None = None) -> None:
        """``vocab_size``: the model's, where it is not the tokenizer's."""
        self._cache: OrderedDict[StructuredSpec, LLMatcher] = OrderedDict()
        self._tasks: SimpleQueue[_Task] = SimpleQueue()
        weakref.finalize(self, self._tasks.put, None)
        _start_thread(self._tasks)
        # At once, since it may take a second in which no other thread of the process gets on.
        self._tokenizer: Future[LLTokenizer] = self._submit(lambda: _mask_tokenizer(load_tokenizer(), vocab_size))

    def compile(self, spec: StructuredSpec) -> Future[LLMatcher]:
        """A matcher at the beginning of an answer. The future raises ``RequestError`` for what cannot be compiled."""
        return self._submit(partial(_compile, spec, self._tokenizer, self._cache))

    def _submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.put((future, work))
        return future


def _compile(
    spec: StructuredSpec, tokenizer: Future[LLTokenizer], cache: OrderedDict[StructuredSpec, LLMatcher]
) -> LLMatcher:
    matcher = cache.pop(spec, None)
    if matcher is None:
        matcher = compile_spec(spec, tokenizer.result())
    cache[spec] = matcher
    if len(cache) > CACHED:
        cache.popitem(last=False)
    return matcher.deep_copy()


def compile_spec(spec: StructuredSpec, tokenizer: LLTokenizer) -> LLMatcher:
    """Raises ``RequestError`` that names the field and the reason."""
    try:
        check_size(spec)
        grammar = _grammar(spec)
        if spec.thoughts is not None:
            grammar = _after_thoughts(grammar, spec, spec.thoughts)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    except RequestError:
        raise
    except (ValueError, RecursionError) as error:
        raise _refusal(spec, str(error)) from None
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        reason = matcher.get_error()
        for beginning, meaning in (("NoExtension", "no text can match it"), ("panic", "it is too large")):
            reason = meaning if reason.startswith(beginning) else reason
        raise _refusal(spec, reason)
    return matcher


def check_size(spec: StructuredSpec) -> None:
    """Raises ``RequestError`` for what would take too long to compile."""
    if spec.kind == "json_object":
        return
    limit = MAX_CHARACTERS[spec.kind]
    if len(spec.value) > limit:
        raise RequestError(
            f"{spec.field} ({spec.kind}) may have at most {limit} characters, got {len(spec.value)}.", param=spec.field
        )
    _check_intersections(spec)
    if spec.kind == "json" and sum(map(len, _patterns(json.loads(spec.value)))) > MAX_CHARACTERS["regex"]:
        raise RequestError(
            f"{spec.field}: the patterns of a schema may have at most {MAX_CHARACTERS['regex']} characters together.",
            param=spec.field,
        )


def _check_intersections(spec: StructuredSpec) -> None:
    if spec.kind == "json":
        count = max((sum(1 for _ in _patterns(part)) for part in _all_of(json.loads(spec.value))), default=0)
    else:
        count = spec.value.count("&") if spec.kind == "grammar" else 0
    if count > MAX_INTERSECTED:
        raise RequestError(
            f"{spec.field} ({spec.kind}) may have at most {MAX_INTERSECTED} patterns for the same text, got {count}.",
            param=spec.field,
        )


def _all_of(schema: Any) -> Iterator[Any]:
    """What stands behind allOf anywhere in a schema."""
    if isinstance(schema, list):
        for item in schema:
            yield from _all_of(item)
    elif isinstance(schema, dict):
        for key, value in schema.items():
            if key == "allOf":
                yield value
            else:
                yield from _all_of(value)


def _patterns(schema: Any) -> Iterator[str]:
    """Regular expressions anywhere in a schema."""
    if isinstance(schema, list):
        for item in schema:
            yield from _patterns(item)
    elif isinstance(schema, dict):
        for key, value in schema.items():
            if key == "pattern" and isinstance(value, str):
                yield value
            elif key == "patternProperties" and isinstance(value, dict):
                yield from value
            yield from _patterns(value)


def _grammar(spec: StructuredSpec) -> str:
    """In llguidance's own notation; raises ``ValueError``."""
    match spec.kind:
        case "json":
            schema = "{}" if spec.value == "true" else spec.value  # options need an object
            return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITE_SPACE})
        case "json_object":
            return _grammar(StructuredSpec(kind="json", value='{"type": "object"}', field=spec.field))
        case "choice":
            # A string of Lark is one of JSON.
            choices = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(spec.value))
            return LLMatcher.grammar_from_lark("start: " + " | ".join(choices))
        case "regex":
            return LLMatcher.grammar_from_regex(spec.value)
        case "grammar":
            return grammar_from("grammar", spec.value)


def _after_thoughts(grammar: str, spec: StructuredSpec, thoughts: Thoughts) -> str:
    """The grammar behind thoughts, which the first end tag ends, and white space, which is layout."""
    start, end = (
        f"<[{tag}]>" if isinstance(tag, int) else json.dumps(tag, ensure_ascii=False)
        for tag in (thoughts.start, thoughts.end)
    )
    rules = [
        f"start: (WHITE? {start})? thoughts WHITE? @answer"
        if thoughts.open
        else f"start: (WHITE? {start} thoughts WHITE?)? @answer",
        # A tag of text may begin and end within tokens, so it belongs to the terminal.
        f"thoughts: TEXT? {end}" if isinstance(thoughts.end, int) else f"thoughts[lazy]: TEXT {end}",
        "TEXT: /(?s:.*)/",
        r"WHITE: /[ \t\r\n]+/",
    ]
    if spec.kind in ("json", "json_object", "regex"):
        [answer] = json.loads(grammar)["grammars"]
    else:
        answer = {"lark_grammar": grammar}
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, {**answer, "name": "answer"}]})


def _refusal(spec: StructuredSpec, reason: str) -> RequestError:
    what = "JSON Schema" if spec.kind == "json" else spec.kind
    reason = " ".join(reason.replace("<non-verbose/>", "").split()) or "it nests too deeply"
    if len(reason) > MAX_REASON:
        reason = reason[:MAX_REASON] + "…"
    return RequestError(f"{spec.field}: the {what} cannot be used: {reason}.", param=spec.field)


def _start_thread(tasks: SimpleQueue[_Task]) -> None:
    """One with a large stack, which does not keep the process from ending."""
    before = threading.stack_size(STACK_BYTES)
    try:
        threading.Thread(target=_work, args=(tasks,), name="grammars", daemon=True).start()
    finally:
        threading.stack_size(before)


def _work(tasks: SimpleQueue[_Task]) -> None:
    while task := tasks.get():
        future, work = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:  # also the library's panics
                future.set_exception(error)
        del future, work, task


class _Vocabulary:
    """A model's tokens in the form that llguidance wants. One more stands for the end of an answer, since which tokens
    end it is the request's business: its bit is behind those of the model's tokens, and not used."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.tokens = [*map(tokenizer.token_bytes, range(vocab_size)), b"<end>"]
        self.eos_token_id = vocab_size
        self.special_token_ids = [*filter(tokenizer.is_special, range(vocab_size)), vocab_size]

        special = set(self.special_token_ids)
        self._ids = {token: i for i, token in enumerate(self.tokens) if token and i not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, data: bytes) -> list[int]:
        """The tokens of text that a grammar leaves no choice about: the tokenizer's own, so that the model sees what it
        knows, if they stand for this text and nothing else; otherwise the longest that fit, one after the other."""
        ids = self._tokenizer.encode(data.decode("utf-8", "replace"), add_special_tokens=False)
        if not any(map(self._tokenizer.is_special, ids)) and b"".join(map(self._tokenizer.token_bytes, ids)) == data:
            return ids
        return self._longest_tokens(data)

    def _longest_tokens(self, data: bytes) -> list[int]:
        ids: list[int] = []
        start = 0
        while start < len(data):
            for end in range(min(len(data), start + self._longest), start, -1):
                if (token := self._ids.get(data[start:end])) is not None:
                    ids.append(token)
                    break
            else:
                break  # no token has this byte: nothing can go on here
            start = end
        return ids


def _mask_tokenizer(tokenizer: Tokenizer, vocab_size: int | None) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer, vocab_size or tokenizer.vocab_size)))
