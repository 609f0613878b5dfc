"""The command line: flags (vLLM's spellings) to one configuration."""

from __future__ import annotations

import argparse
import signal
import sys
from typing import Any

import jaxserve
from jaxserve import config as options
from jaxserve.config import EngineConfig, ServerConfig


def main(argv: list[str] | None = None) -> int:
    """``jaxserve [serve] --model DIR [flags]`` or ``jaxserve serve DIR [flags]``; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the server handles it: Ctrl-C ends this without a traceback
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["serve"]:
        argv = argv[1:]
        if argv and not argv[0].startswith("-"):
            argv = ["--model", *argv]
    parser = make_parser()
    arguments = vars(parser.parse_args(argv))
    try:
        server = make_config(arguments)
    except ValueError as error:
        parser.error(str(error))
    from jaxserve.server.launch import run

    return run(server)


def make_config(arguments: dict[str, Any]) -> ServerConfig:
    """Sort parsed flags into the two records; raises ``ValueError`` naming the flag."""
    engine_fields, server_fields = EngineConfig.__struct_fields__, ServerConfig.__struct_fields__
    engine = EngineConfig(**{name: value for name, value in arguments.items() if name in engine_fields})
    rest = {name: value for name, value in arguments.items() if name in server_fields}
    if "served_model_name" in rest:
        rest["served_model_name"] = tuple(rest["served_model_name"])
    return ServerConfig(engine=engine, **rest)


def make_parser() -> argparse.ArgumentParser:
    """All flags, grouped; those not given are absent, and the defaults of ``config`` hold."""
    parser = argparse.ArgumentParser(
        prog="jaxserve",
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
    return parser


def _model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", required=True, metavar="DIR",
        help="model directory in HuggingFace layout, or 'demo': a small chat model, fetched once",
    )  # fmt: skip
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="names that requests may use [--model]")
    group.add_argument("--tokenizer", metavar="DIR", help="directory of the tokenizer files [--model]")
    group.add_argument("--chat-template", metavar="FILE", help="Jinja file that replaces the model's chat template")
    group.add_argument(
        "--generation-config", metavar="auto|vllm|DIR",
        help="sampling defaults: auto, the model's generation_config.json; vllm, neutral; or a directory [auto]",
    )  # fmt: skip
    group.add_argument("--dtype", choices=options.DTYPES, help="[auto: float32 on a CPU, else the checkpoint's]")
    group.add_argument("--load-format", choices=options.LOAD_FORMATS, help="[safetensors]")
    group.add_argument(
        "--max-model-len", type=_length, metavar="N|auto",
        help="tokens of prompt and answer together; auto: what the KV cache can hold [the model's]",
    )  # fmt: skip
    group.add_argument("--max-logprobs", type=int, metavar="N", help="most log-probabilities a token [20]")
    group.add_argument("--seed", type=int, metavar="N", help="makes unseeded requests reproducible over restarts")


def _server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", metavar="ADDRESS", help="[127.0.0.1]")
    group.add_argument("--port", type=int, metavar="N", help="[8000]")
    group.add_argument("--shutdown-timeout", type=float, metavar="S", help="time to finish after SIGTERM [30]")
    group.add_argument("--log-level", choices=options.LOG_LEVELS, help="[info]")
    group.add_argument("--log-json", action="store_true", help="log JSON objects, one a line")


def _engine_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("scheduling")
    group.add_argument("--max-num-seqs", type=_count, metavar="N", help="sequences at once [CPU 16, GPU 256]")
    group.add_argument("--max-num-batched-tokens", type=_count, metavar="N", help="tokens a step [CPU 512, GPU 8192]")
    group.add_argument("--async-depth", type=int, metavar="N", help="steps in flight, 1 or 2 [CPU 1, GPU 2]")
    group.add_argument("--row-buckets", type=_sizes, metavar="N,N", help="padded numbers of decoding sequences")
    group.add_argument("--token-buckets", type=_sizes, metavar="N,N", help="padded sizes of prefill steps")


def _device_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory and devices")
    group.add_argument("--block-size", type=int, metavar="N", help="tokens a KV block [16]")
    group.add_argument("--gpu-memory-utilization", type=float, metavar="F", help="share of GPU memory to use [0.9]")
    group.add_argument("--kv-cache-memory", type=_count, metavar="BYTES", help="size of the KV cache, e.g. 2GiB")
    group.add_argument("--num-gpu-blocks-override", type=_count, metavar="N", help="KV blocks, whatever the memory")
    group.add_argument(
        "--attention-backend",
        choices=options.ATTENTION_BACKENDS,
        help="[auto: GPU triton, Hopper mosaic_gpu where it can, CPU reference]",
    )
    group.add_argument("--tensor-parallel-size", type=int, metavar="N", help="[1]")
    group.add_argument("--compilation-cache-dir", metavar="DIR", help="[the user's cache directory]")


def _length(text: str) -> int | str:
    return text if text == "auto" else _count(text)


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


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of sizes such as 1,4,16") from None
