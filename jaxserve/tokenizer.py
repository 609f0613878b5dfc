"""Text to token ids and back: prompts, chats, and the bytes that each token stands for."""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import tokenizers

from jaxserve.chat_template import ChatTemplate, map_strings, plain_messages, read_template
from jaxserve.request import RequestError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A checkpoint's tokenizer. Its methods may be called from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        tool_template: str | None = None,
    ) -> None:
        self._backend = backend
        self.named_tokens = dict(named_tokens or {})
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes = _token_bytes(backend)
        self.chat_template = None if chat_template is None else ChatTemplate(chat_template, self.named_tokens)
        self._tool_template = (
            self.chat_template if tool_template is None else ChatTemplate(tool_template, self.named_tokens)
        )
        """For conversations with tools."""
        bos = self.named_tokens.get("bos_token")
        self.bos_id = None if bos is None else backend.token_to_id(bos)

    @classmethod
    def load(cls, directory: str | Path, chat_template_file: str | Path | None = None) -> Tokenizer:
        """Reads tokenizer.json and its companions; ``ValueError`` names the file that will not do."""
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{path} does not exist; a tokenizer in HuggingFace's fast format is needed")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path} cannot be read: {error}") from error
        # A saved tokenizer may carry the padding or truncation of its training; a prompt must have neither.
        backend.no_padding()
        backend.no_truncation()
        config = _read_json(directory / "tokenizer_config.json")
        named = _named_tokens(_read_json(directory / "special_tokens_map.json") | config)
        where = Path(chat_template_file) if chat_template_file is not None else directory
        try:
            if chat_template_file:
                sources = [where.read_text("utf-8"), None]
            else:
                sources = [read_template(directory, config, name) for name in ("default", "tool_use")]
            default, with_tools = sources
            _check_markup(backend, config, f"{default}{with_tools}")
            return cls(backend, named_tokens=named, chat_template=default, tool_template=with_tools)
        except jinja2.TemplateError as error:
            raise ValueError(f"{where}: the chat template cannot be parsed: {error}") from error
        except (OSError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise ValueError(f"{where}: the chat template cannot be read: {error}") from error
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error

    @classmethod
    def from_json(cls, serialized: str) -> Tokenizer:
        """What ``to_json`` gave, without a chat template."""
        return cls(tokenizers.Tokenizer.from_str(serialized))

    def to_json(self) -> str:
        """What text is made of, as tokenizer.json has it."""
        serialized: str = self._backend.to_str()
        return serialized

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id."""
        return len(self._bytes)

    @property
    def shows_tools(self) -> bool:
        """Whether the chat template tells the model of tools."""
        return self._tool_template is not None and self._tool_template.knows("tools")

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text; nothing, for an id that a model's padded vocabulary has on top."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def token_text(self, token_id: int) -> str:
        """A token on its own, as logprobs and /tokenize show it."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        """The id of the token that is spelled like this, if there is one."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a raw prompt; text of special tokens in it is parsed, and BOS is never doubled."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self.bos_id is not None and ids[:2] == [self.bos_id, self.bos_id]:
            # Either the text brought its own BOS, or it brought two, which then is what the caller wants.
            bos = self.named_tokens["bos_token"]
            if not text.startswith(bos + bos):
                return ids[1:]
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The library's own decoding of a whole sequence, in which a prompt's first space may go."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        add_special_tokens: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """The ids of a conversation in the model's own chat format; raises ``RequestError``.

        Text of special tokens counts as such where the template writes it; where a message contains it, it
        is ordinary text, so that no message can pose as another turn.
        """
        template = self._tool_template if tools else self.chat_template
        if template is None:
            raise RequestError(
                "This model has no chat template; send text to /v1/completions, or start the server with"
                " --chat-template.",
                param="messages",
            )
        if tools and not self.shows_tools:
            raise RequestError("The chat template of this model takes no tools.", param="tools")
        plain = plain_messages(messages)
        if not template.knows("developer"):  # OpenAI's newer word for the same
            plain = [{**m, "role": "system"} if m.get("role") == "developer" else m for m in plain]
        mark = _Mark(self._markup)
        marked = [mark.message(message) for message in plain]
        marked_tools = None if tools is None else map_strings(list(tools), mark.text)
        marked_kwargs = map_strings(kwargs, mark.text)
        text = template.render(marked, add_generation_prompt=add_generation_prompt, tools=marked_tools, **marked_kwargs)
        if continue_final_message:
            text = _cut_after(text, marked[-1]["content"])
        if not mark.used:
            return self.encode(text, add_special_tokens)
        return self._guarded.encode(text, mark, add_special_tokens)

    @functools.cached_property
    def _markup(self) -> _Markup:
        added = self._backend.get_added_tokens_decoder().values()
        source = "".join(template.source for template in (self.chat_template, self._tool_template) if template)
        special = [token.content for token in added if token.special]
        written = [token.content for token in added if not token.special and token.content in source]
        return _Markup(_any_of(special), _any_of(special + written))

    @functools.cached_property
    def _guarded(self) -> _GuardedBackend:
        return _GuardedBackend(self._backend)


class _Markup:
    """Which text a template's turns are made of.

    Special tokens, and other added tokens that the template itself writes. The latter are left alone in what
    the assistant said: ``<think>`` and the like are a model's own words, and templates take them apart.
    """

    def __init__(self, special: re.Pattern[str], all_of_it: re.Pattern[str]) -> None:
        self.special = special
        self.all = all_of_it


class _Mark:
    """Breaks up markup in the strings of one request, in a way that can be undone after rendering."""

    def __init__(self, markup: _Markup) -> None:
        self._markup = markup
        # Random, so that no message can contain it: a mark is taken out again wherever it stands.
        self._mark = "".join(chr(0xF0000 + secrets.randbelow(0xFFFE)) for _ in range(4))
        self.used = False

    def message(self, message: dict[str, Any]) -> dict[str, Any]:
        own_words = message.get("role") == "assistant"
        pattern = self._markup.special if own_words else self._markup.all
        return {key: map_strings(value, lambda text: self._break(text, pattern)) for key, value in message.items()}

    def text(self, text: str) -> str:
        return self._break(text, self._markup.all)

    def _break(self, text: str, pattern: re.Pattern[str]) -> str:
        broken, count = pattern.subn(lambda match: "".join(c + self._mark for c in match[0]), text)
        self.used = self.used or count > 0
        return broken

    def remove(self, text: str) -> str:
        return text.replace(self._mark, "")


class _GuardedBackend:
    """A copy of the tokenizer whose added tokens match only behind a guard that nobody outside knows.

    One pass of the library then encodes a text in which some markup counts and some does not, with the same
    ids as ever: normalisation and the flags of added tokens see the text as a whole.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._guard = secrets.token_hex(16)
        added = backend.get_added_tokens_decoder()
        spec = json.loads(backend.to_str())
        for token in spec["added_tokens"]:
            token["content"] = self._guard + token["content"]
        self._backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
        self._ids = {
            self._backend.token_to_id(self._guard + token.content): token_id for token_id, token in added.items()
        }
        self._tokens = _any_of([token.content for token in added.values()], shortest=1)

    def encode(self, marked_text: str, mark: _Mark, add_special_tokens: bool) -> list[int]:
        guarded = mark.remove(self._tokens.sub(lambda match: self._guard + match[0], marked_text))
        ids = self._backend.encode(guarded, add_special_tokens=add_special_tokens).ids
        return [self._ids.get(token_id, token_id) for token_id in ids]


def _any_of(texts: Sequence[str], shortest: int = 2) -> re.Pattern[str]:
    """Matches the longest of these at the leftmost place, as the library matches added tokens."""
    wanted = sorted((text for text in texts if len(text) >= shortest and text.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, wanted)) or r"(?!)")


def _cut_after(text: str, final: str) -> str:
    """Ends the text right after the last message, so that the model goes on with it."""
    start = text.rfind(final.strip()) if final.strip() else -1
    if start < 0:
        raise RequestError(
            "continue_final_message: the last message is empty, or the template does not show it as it is.",
            param="continue_final_message",
        )
    whole, bare = final.lstrip(), final.strip()  # templates trim, or do not
    return text[: start + len(whole if text.startswith(whole, start) else bare)]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return value


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    named = {}
    for name in NAMED_TOKENS:
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            named[name] = text
    return named


def _check_markup(backend: tokenizers.Tokenizer, config: Mapping[str, Any], templates: str) -> None:
    """A control token that a template writes must be read as the one token that tokenizer_config.json says it is."""
    for token_id, token in config.get("added_tokens_decoder", {}).items():
        text = token["content"]
        if token.get("special") and text in templates:
            ids = backend.encode(text, add_special_tokens=False).ids
            if ids != [int(token_id)]:
                raise ValueError(
                    f"the chat template writes {text!r}, token {token_id}, which tokenizer.json reads as {ids}"
                )


def _token_bytes(backend: tokenizers.Tokenizer) -> list[bytes]:
    """The bytes of every token id. A decoder of unknown kind is refused: its text would be subtly wrong."""
    convert = _byte_converter(json.loads(backend.to_str())["decoder"])
    vocab = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        table[token_id] = token.encode() if token_id in added else convert(token)
    return table


def _byte_converter(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    parts = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return _byte_level_converter()
    if "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        replaced = [(part["pattern"], part["content"]) for part in parts if part["type"] == "Replace"]
        if replaced == [({"String": "▁"}, " ")]:
            return _sentencepiece_bytes
    named = ", ".join(kinds) or "none"
    raise ValueError(f"the tokenizer's decoder ({named}) is not supported; ByteLevel and ByteFallback are")


def _byte_level_converter() -> Callable[[str], bytes]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, other bytes are at U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(other)}

    def convert(token: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in token])
        except KeyError:  # not written in the alphabet: the library takes such a token as it is
            return token.encode()

    return convert


def _sentencepiece_bytes(token: str) -> bytes:
    if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()
