"""The command line: flags (vLLM's spellings) to one configuration."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import signal
import sys
from typing import Any, NoReturn

import jaxserve
from jaxserve import config as options
from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.flags_file import FlagsFile
from jaxserve.vllm_flags import add_vllm_flags

API_KEY_VARIABLE = "JAXSERVE_API_KEY"


def main(argv: list[str] | None = None) -> int:
    """``jaxserve [serve] --model DIR [flags]`` or ``jaxserve serve DIR [flags]``; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the server handles it: Ctrl-C ends this without a traceback
    try:
        server = parse(sys.argv[1:] if argv is None else argv)
    except ValueError as error:
        print(f"jaxserve: {error}; see jaxserve --help", file=sys.stderr)
        return 2
    from jaxserve.server.launch import run

    return run(server)


def parse(argv: list[str]) -> ServerConfig:
    """The configuration that a command line, and the flags file that it names, come to.

    Raises ``ValueError``, one line that names the flag, and the file where the flag stands there.
    """
    parser = make_parser()
    file = FlagsFile(_with_model_flag([_with_dashes(word) for word in argv]), parser)
    try:
        arguments, unknown = parser.parse_known_args(file.argv)
        if unknown:
            raise ValueError(_about_unknown(unknown[0], parser))
        if "model" not in arguments:
            raise ValueError("--model is missing: a model directory, or demo")
        return make_config(vars(arguments))
    except ValueError as error:
        raise ValueError(f"{file.origin(str(error))}{error}") from None


def _with_dashes(word: str) -> str:
    """``--max_model_len=8`` as ``--max-model-len=8``."""
    flag, *value = word.split("=", 1)
    return "=".join([flag.replace("_", "-"), *value]) if word.startswith("--") else word


def _with_model_flag(argv: list[str]) -> list[str]:
    """``serve DIR`` as ``--model DIR``."""
    command, *rest = argv or [""]
    if command.startswith("-") or not command:
        return argv
    if command != "serve":
        raise ValueError(f"{command} is not a command; to serve a model: jaxserve serve {command}")
    if not rest or rest[0].startswith("-"):
        return rest
    model, *flags = rest
    if any(flag.split("=")[0] == "--model" for flag in flags):
        raise ValueError(f"--model names a model, and so does serve {model}")
    return ["--model", *rest]


def _about_unknown(word: str, parser: argparse.ArgumentParser) -> str:
    flag = word.split("=")[0]
    if not flag.startswith("-"):
        return f"{word} belongs to no flag (a model stands right after serve: jaxserve serve {word})"
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    close = difflib.get_close_matches(flag, [name for action in shown for name in action.option_strings], 1)
    return f"{flag} is not a flag" + (f", but {close[0]} is" if close else "")


def make_config(arguments: dict[str, Any]) -> ServerConfig:
    """Sort parsed flags into the two records; raises ``ValueError`` naming the flag."""
    engine_fields, server_fields = EngineConfig.__struct_fields__, ServerConfig.__struct_fields__
    engine = EngineConfig(**{name: value for name, value in arguments.items() if name in engine_fields})
    rest = {name: value for name, value in arguments.items() if name in server_fields}
    if "api_key" not in rest and (key := os.environ.get(API_KEY_VARIABLE)):
        rest["api_key"] = (key,)
    for name in ("served_model_name", "api_key"):
        if name in rest:
            rest[name] = tuple(rest[name])
    return ServerConfig(engine=engine, **rest)


class _Parser(argparse.ArgumentParser):
    """Raises ``ValueError``, since one line says more than all the flags do."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def make_parser() -> argparse.ArgumentParser:
    """All flags, grouped; those not given are absent, and the defaults of ``config`` hold."""
    parser = _Parser(
        prog="jaxserve",
        usage="jaxserve [serve] --model DIR [flags], or jaxserve serve DIR [flags]",
        description="Serve a Llama or Mistral model behind OpenAI's API.",
        epilog="Example: jaxserve --model demo",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"jaxserve {jaxserve.__version__}")
    _model_flags(parser)
    _server_flags(parser)
    _engine_flags(parser)
    _device_flags(parser)
    add_vllm_flags(parser)
    return parser


def _model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", metavar="DIR",
        help="model directory in HuggingFace layout, or 'demo': a small chat model, fetched once",
    )  # fmt: skip
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="names that requests may use [--model]")
    group.add_argument("--tokenizer", metavar="DIR", help="directory of the tokenizer files [--model]")
    group.add_argument("--chat-template", metavar="FILE", help="Jinja file that replaces the model's chat template")
    group.add_argument(
        "--generation-config", metavar="auto|vllm|DIR",
        help="sampling defaults: auto, the model's generation_config.json; vllm, neutral; or a directory [auto]",
    )  # fmt: skip
    group.add_argument(
        "--override-generation-config", type=_json_object, metavar="JSON",
        help="""sampling defaults that go before those, e.g. '{"temperature": 0.6}'""",
    )  # fmt: skip
    group.add_argument(
        "--dtype", type=_dtype, choices=options.DTYPES,
        help="half is float16, and float float32 [auto: float32 on a CPU, else the checkpoint's]",
    )  # fmt: skip
    group.add_argument("--load-format", choices=options.LOAD_FORMATS, help="[safetensors]")
    group.add_argument(
        "--max-model-len", type=_length, metavar="N|auto",
        help="tokens of prompt and answer together; auto or -1: what the KV cache can hold [the model's]",
    )  # fmt: skip
    group.add_argument("--max-logprobs", type=int, metavar="N", help="most log-probabilities a token [20]")
    group.add_argument("--seed", type=int, metavar="N", help="makes unseeded requests reproducible over restarts")


def _server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", metavar="ADDRESS", help="[127.0.0.1]")
    group.add_argument("--port", type=int, metavar="N", help="[8000]")
    group.add_argument("--api-server-count", type=int, metavar="N", help="processes that speak HTTP [1]")
    group.add_argument("--uds", metavar="PATH", help="Unix socket to listen on, in the place of host and port")
    group.add_argument("--root-path", metavar="/PREFIX", help="what a proxy in front takes off the paths")
    group.add_argument(
        "--api-key", nargs="+", action="extend", metavar="KEY",
        help=f"keys of which a request must bring one; may be repeated [${API_KEY_VARIABLE}, which ps does not show]",
    )  # fmt: skip
    group.add_argument("--allowed-origins", type=_strings, metavar="JSON", help="origins that browsers may call from")
    group.add_argument("--allowed-methods", type=_strings, metavar="JSON", help="""their methods ['["*"]']""")
    group.add_argument("--allowed-headers", type=_strings, metavar="JSON", help="""their headers ['["*"]']""")
    group.add_argument("--allow-credentials", action="store_true", help="they may send cookies")
    for name, what in (("keyfile", "private key"), ("certfile", "certificate"), ("ca-certs", "clients' authorities")):
        group.add_argument(f"--ssl-{name}", metavar="FILE", help=f"TLS: {what}, in PEM")
    group.add_argument("--ssl-cert-reqs", type=int, metavar="N", help="TLS: 2 wants clients' certificates [0]")
    group.add_argument("--config", metavar="FILE", help="YAML file of flags; the command line goes before it")
    group.add_argument("--accept-any-model", action="store_true", help="requests may name any model")
    group.add_argument("--enable-auto-tool-choice", action="store_true", help="the model may call a request's tools")
    group.add_argument("--tool-call-parser", choices=options.TOOL_PARSERS, help="how it writes that")
    group.add_argument(
        "--reasoning-parser", metavar="NAME",
        help="how the model marks its thoughts: deepseek_r1, qwen3, or its own tags as START...END",
    )  # fmt: skip
    group.add_argument("--pooling", choices=options.POOLINGS, help="which hidden states make an embedding [last]")
    group.add_argument(
        "--enable-force-include-usage", action="store_true", help="streams end with usage, asked for or not"
    )
    group.add_argument("--enable-per-request-metrics", action="store_true", help="answers tell where their time went")
    group.add_argument("--enable-request-id-headers", action="store_true", help="every answer has an X-Request-Id")
    group.add_argument("--shutdown-timeout", type=float, metavar="S", help="time to finish after SIGTERM [30]")
    group.add_argument(
        "--max-num-queued-reqs", type=_count_or_none, metavar="N|none",
        help="requests that may wait; calls beyond are answered 429 [1024]",
    )  # fmt: skip
    group.add_argument(
        "--max-num-queued-tokens", type=_count_or_none, metavar="N|none", help="tokens that may wait [none]"
    )
    group.add_argument(
        "--max-queue-wait", type=float, metavar="S", help="calls that would wait longer are answered 429 [none]"
    )
    group.add_argument(
        "--request-timeout", type=float, metavar="S", help="answers end with what they have after this time [none]"
    )
    group.add_argument("--enable-debug-steps", action="store_true", help="GET /debug/steps shows the last steps")
    group.add_argument("--log-level", choices=options.LOG_LEVELS, help="[info]")
    group.add_argument("--log-json", action="store_true", help="log JSON objects, one a line")
    group.add_argument("--disable-log-stats", action="store_true", help="no line on the traffic every ten seconds")


def _engine_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("scheduling")
    group.add_argument("--max-num-seqs", type=_count, metavar="N", help="sequences at once [CPU 16, GPU 256]")
    group.add_argument("--max-num-batched-tokens", type=_count, metavar="N", help="tokens a step [CPU 512, GPU 8192]")
    group.add_argument(
        "--prefill-chunk-tokens", type=_chunk, metavar="LOW,HIGH|all",
        help="prompt tokens a step beside decoding: LOW where few wait and decode, up to HIGH [CPU all, GPU 384,1792]",
    )  # fmt: skip
    group.add_argument(
        "--scheduling-policy", choices=("fcfs", "priority"), help="order of admission: by arrival or by priority [fcfs]"
    )
    group.add_argument("--async-depth", type=int, metavar="N", help="steps in flight, 1 or 2 [CPU 1, GPU 2]")
    group.add_argument("--row-buckets", type=_sizes, metavar="N,N", help="padded numbers of decoding sequences")
    group.add_argument("--token-buckets", type=_sizes, metavar="N,N", help="padded sizes of prefill steps")


def _device_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory and devices")
    group.add_argument("--block-size", type=int, metavar="N", help="tokens a KV block [16]")
    group.add_argument("--gpu-memory-utilization", type=float, metavar="F", help="share of GPU memory to use [0.9]")
    group.add_argument(
        "--swap-space", type=float, metavar="GIB",
        help="pinned host memory for KV blocks of preempted requests, used where cheaper than computing again [0]",
    )  # fmt: skip
    group.add_argument("--kv-cache-dtype", choices=("auto",), help="[auto: the model's]")
    group.add_argument(
        "--kv-cache-memory-bytes", "--kv-cache-memory", dest="kv_cache_memory", type=_count, metavar="BYTES",
        help="size of the KV cache, e.g. 2GiB",
    )  # fmt: skip
    group.add_argument("--num-gpu-blocks-override", type=_count, metavar="N", help="KV blocks, whatever the memory")
    group.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction,
        help="keep KV blocks for later requests that begin with the same tokens [on]",
    )  # fmt: skip
    group.add_argument(
        "--attention-backend", choices=options.ATTENTION_BACKENDS,
        help="triton: nothing else; mosaic_gpu: must do prefill [auto: the fastest that can be; on a CPU reference]",
    )  # fmt: skip
    group.add_argument(
        "--linear-backend", choices=options.LINEAR_BACKENDS,
        help="triton: for products of up to 128 rows [auto: on Hopper triton, else reference, which is XLA's]",
    )  # fmt: skip
    group.add_argument("--tensor-parallel-size", "-tp", type=int, metavar="N", help="[1]")
    group.add_argument("--compilation-cache-dir", metavar="DIR", help="[the user's cache directory]")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def _strings(text: str) -> tuple[str, ...]:
    """A JSON list, as vLLM has it, or values with commas between."""
    try:
        values = json.loads(text)
    except ValueError:
        values = text.split(",")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise argparse.ArgumentTypeError(f'{text!r} is not a list such as ["https://example.com"]')
    return tuple(values)


def _dtype(text: str) -> str:
    return {"half": "float16", "float": "float32"}.get(text, text)


def _length(text: str) -> int | str:
    return "auto" if text in ("auto", "-1") else _count(text)


def _count_or_none(text: str) -> int | None:
    return None if text == "none" else _count(text)


def _count(text: str) -> int:
    """A whole number; k, m and g are thousands, millions and so on, K, M and G powers of 1024 (as vLLM reads them)."""
    units = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    number = text.removesuffix("iB").removesuffix("B")
    try:
        if number[-1:] in units:
            return int(float(number[:-1]) * units[number[-1]])
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 8192, 8k or 2GiB") from None


def _chunk(text: str) -> tuple[int, ...] | str:
    return text if text == "all" else _sizes(text)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of sizes such as 1,4,16") from None
