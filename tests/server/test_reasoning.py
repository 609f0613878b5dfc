"""Thoughts and answer, told apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve import config
from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.server.reasoning import FORMATS, ReasoningSplitter, Thought, reasoning_format
from jaxserve.tokenizer import Tokenizer
from tests.server.calls import CHAT, COMPLETIONS, Body, ok, plain, post, stream
from tests.server.conftest import Served, encode_answer, serve
from tests.server.obedient import obedient


def split(name: str, *texts: str, prompt_end: str = "") -> tuple[str, str]:
    """Reasoning and content of a text that comes in pieces."""
    splitter = ReasoningSplitter(reasoning_format(name), prompt_end)
    pieces = [piece for text in texts for piece in splitter.feed(text)] + splitter.feed("", final=True)
    thoughts = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    return thoughts, "".join(piece for piece in pieces if isinstance(piece, str))


@pytest.mark.parametrize(
    ("name", "text", "prompt_end", "expected"),
    [
        ("deepseek_r1", "<think>\nHm.\n</think>\n\nYes.\n", "", ("Hm.", "Yes.\n")),
        ("deepseek_r1", "Hm.</think>Yes.", "", ("Hm.", "Yes.")),
        ("deepseek_r1", "Hm. 1 </ 2", "", ("Hm. 1 </ 2", "")),
        ("deepseek_r1", "Yes.", "<think>\n\n</think>\n\n", ("", "Yes.")),
        ("qwen3", "\n<think>Hm.</think> Yes.", "", ("Hm.", "Yes.")),
        ("qwen3", " Yes <think>.", "", ("", " Yes <think>.")),
        ("qwen3", "Hm.\n</think>Yes.", "assistant\n<think>\n", ("Hm.", "Yes.")),
        ("qwen3", "<think>\n\n</think>Yes.", "", ("", "Yes.")),
        ("qwen3", "<think>Hm. </thin", "", ("Hm. </thin", "")),
        ("qwen3", "<thi", "", ("", "<thi")),
        ("[THINK]...[/THINK]", "[THINK]Hm.[/THINK]Yes.", "", ("Hm.", "Yes.")),
    ],
)
def test_what_a_text_comes_to(name: str, text: str, prompt_end: str, expected: tuple[str, str]) -> None:
    assert split(name, text, prompt_end=prompt_end) == expected
    assert split(name, *text, prompt_end=prompt_end) == expected


@given(
    name=st.sampled_from(["deepseek_r1", "qwen3", "aab...aac"]),
    parts=st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think>", "a", "aab", "aac", " ", "\n"])),
)
def test_no_cut_shows(name: str, parts: list[str]) -> None:
    text = "".join(parts)
    whole = split(name, text)
    assert split(name, *text) == split(name, *parts) == whole


def test_the_flag_knows_all_formats() -> None:
    assert set(config.REASONING_PARSERS) == set(FORMATS)
    for name in ("nonsense", "...", "<a>...", " ...</a>"):
        with pytest.raises(ValueError, match="--reasoning-parser"):
            ServerConfig(engine=EngineConfig(model="x"), reasoning_parser=name)


@pytest.fixture(scope="module")
def thinking(llama_3: Tokenizer) -> Iterator[Served]:
    with serve(llama_3, 518, reasoning_parser="qwen3") as served:
        yield served


def parts_of_stream(chunks: list[Body]) -> tuple[str, str]:
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert not any("reasoning" in delta and "content" in delta for delta in deltas)
    return "".join(d.get("reasoning", "") for d in deltas), "".join(d.get("content", "") for d in deltas)


def test_reasoning_streamed_and_not(thinking: Served) -> None:
    thinking.says("<think>\nWell, 🫠.\n</think>\n\nYes.")
    message = ok(post(thinking, CHAT))["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Yes.", "refusal": None, "reasoning": "Well, 🫠."}
    assert parts_of_stream(stream(thinking, CHAT)) == ("Well, 🫠.", "Yes.")


def test_reasoning_that_is_cut(thinking: Served) -> None:
    thinking.says("<think>Well, well, well", eos=False)
    choice = ok(post(thinking, CHAT, max_tokens=20))["choices"][0]
    assert choice["message"]["content"] is None and choice["finish_reason"] == "length"
    assert parts_of_stream(stream(thinking, CHAT, max_tokens=20)) == (choice["message"]["reasoning"], "")


def test_reasoning_can_be_left_out(thinking: Served) -> None:
    thinking.says("<think>Well.</think>Yes.")
    message = ok(post(thinking, CHAT, include_reasoning=False))["choices"][0]["message"]
    assert "reasoning" not in message and message["content"] == "Yes."
    assert parts_of_stream(stream(thinking, CHAT, include_reasoning=False)) == ("", "Yes.")


def test_calls_after_thoughts(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    template = tmp_path / "tools.jinja"
    template.write_text("{{ tools }}{{ messages }}{{ reasoning_effort }}")
    tokenizer = Tokenizer.load(checkpoints["tiny-llama-3.1"], template)
    options: dict[str, Any] = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with serve(tokenizer, 518, reasoning_parser="deepseek_r1", **options) as served:
        served.says('Use <tool_call>?</think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>')
        tools = [{"type": "function", "function": {"name": "f"}}]
        choice = ok(post(served, CHAT, tools=tools, reasoning_effort="low"))["choices"][0]
        assert choice["message"]["reasoning"] == "Use <tool_call>?" and choice["message"]["content"] is None
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
        assert choice["finish_reason"] == "tool_calls"
        prompt = served.engine.received[0].requests[0].prompt_token_ids  # type: ignore[union-attr]
        assert tokenizer.decode(prompt).endswith("low")


def held_answer(served: Served, says: str, **fields: Any) -> tuple[str, str]:
    """Reasoning and content of an answer that begins with this text and goes on with what its grammar allows."""
    served.engine.script = obedient(served.tokenizer, served.eos_id, encode_answer(served.tokenizer, says))
    fields |= {"max_tokens": 200}
    message = ok(post(served, CHAT, **fields))["choices"][0]["message"]
    answer = message.get("reasoning", ""), message["content"] or ""
    assert parts_of_stream(stream(served, CHAT, **fields)) == answer
    return answer


CHOICE: Body = {"structured_outputs": {"choice": ["yes", "no"]}}


def test_a_grammar_begins_where_the_thoughts_end(thinking: Served) -> None:
    for says, thoughts in (("<think>\nNo: yes!</think>\n\n", "No: yes!"), ("<think></think>", ""), ("", "")):
        reasoning, content = held_answer(thinking, says, **CHOICE)
        assert reasoning == thoughts and content in ("yes", "no")


def test_a_model_that_always_thinks_does_so_before_a_grammar(llama_3: Tokenizer) -> None:
    with serve(llama_3, 518, reasoning_parser="deepseek_r1") as served:
        for says in ("Hm, yes.</think>", "<think>Hm, yes.</think>\n"):
            reasoning, content = held_answer(served, says, **CHOICE)
            assert reasoning == "Hm, yes." and content in ("yes", "no")
        served.says("Hm, yes. No.", eos=False)
        choice = ok(post(served, CHAT, max_tokens=20, **CHOICE))["choices"][0]
        assert choice["message"]["content"] is None and choice["finish_reason"] == "length"
        served.engine.script = obedient(served.tokenizer, 518)
        assert plain(served, COMPLETIONS, max_tokens=20, **CHOICE)[0] in ("yes", "no"), "raw text has no thoughts"


@pytest.mark.parametrize(("prompt_end", "says"), [("<think>\n", "Hm.</think>"), ("<think></think>\n\n", "")])
def test_a_prompt_may_have_opened_or_closed_the_thoughts(
    checkpoints: dict[str, Path], tmp_path: Path, prompt_end: str, says: str
) -> None:
    template = tmp_path / "thinking.jinja"
    template.write_text("{{ messages }}{{ tools }}" + prompt_end.replace("\n", "{{ '\\n' }}"))
    tokenizer = Tokenizer.load(checkpoints["tiny-llama-3.1"], template)
    with serve(tokenizer, 518, context=1024, reasoning_parser="qwen3") as served:
        reasoning, content = held_answer(served, says, **CHOICE)
        assert reasoning == says.removesuffix("</think>") and content in ("yes", "no")
        tools = [{"type": "function", "function": {"name": "f"}}]
        served.engine.script = obedient(tokenizer, 518, encode_answer(tokenizer, says))
        message = ok(post(served, CHAT, tools=tools, tool_choice="required", max_tokens=200))["choices"][0]["message"]
        assert message["tool_calls"][0]["function"]["name"] == "f" and message["content"] is None
