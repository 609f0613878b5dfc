"""Everything a server is started with: one frozen record, made by the command line or by ``LLM(...)``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from jaxserve.request import Pooling

DTYPES = ("auto", "float32", "bfloat16", "float16")
ATTENTION_BACKENDS = ("auto", "reference", "triton", "mosaic_gpu")
LINEAR_BACKENDS = ("auto", "reference", "triton")
LOAD_FORMATS = ("safetensors", "dummy")
REASONING_PARSERS = ("deepseek_r1", "qwen3")
TOOL_PARSERS = ("hermes", "llama3_json", "mistral", "pythonic")
POOLINGS = get_args(Pooling)
LOG_LEVELS = ("debug", "info", "warning", "error")
MAX_API_SERVERS = 64


def cache_root() -> Path:
    """Folder for everything jaxserve keeps between runs: ``$JAXSERVE_CACHE``, else the user's cache."""
    if own := os.environ.get("JAXSERVE_CACHE"):
        return Path(own).expanduser().absolute()
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification has relative paths ignored.
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "jaxserve"


def not_a_model(model: str) -> str:
    """What to say of a ``--model`` that is no directory with a config.json."""
    path = Path(model)
    if path.is_dir():
        return f"{model} is not a model directory: it has no config.json"
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", model):
        get = f"hf download {model} --local-dir {path.name}"
        return f"{model} is not a directory, and nothing is downloaded: '{get}' fetches it for --model {path.name}"
    return f"{model} is not a directory; --model takes a HuggingFace model directory, or demo"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model and the engine. ``None`` and "auto" mean: chosen by device and model, and logged.

    Raises ``ValueError``, naming the flag, for a value that can never work.
    """

    model: str
    """A directory in HuggingFace layout, or ``demo``."""
    tokenizer: str | None = None
    dtype: str = "auto"
    max_model_len: int | Literal["auto"] | None = None
    """Prompt and answer together; None: what the model was made for; auto: that, or what the KV pool holds."""
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    prefill_chunk_tokens: tuple[int, int] | Literal["all"] | None = None
    """Prompt tokens of a step while sequences decode: the first where few wait, up to the second where many do, and a
    little more where that fills a token bucket; all: what max_num_batched_tokens has room for. None: by device."""
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory: int | None = None
    """Bytes of KV pool; overrides the memory fraction."""
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    """Keep full KV blocks for later requests that begin with the same tokens."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    swap_space: float = 0.0
    """GiB of pinned host memory for the KV blocks of preempted requests; 0: their tokens are computed again."""
    attention_backend: str = "auto"
    linear_backend: str = "auto"
    """Of matrix products of few rows without a bias; reference is XLA's."""
    async_depth: int | None = None
    tensor_parallel_size: int = 1
    seed: int | None = None
    """Seeds the seeds of unseeded requests, for reproducible experiments; None: the operating system's randomness."""
    max_logprobs: int = 20
    generation_config: str = "auto"
    """auto: defaults from the model's generation_config.json; vllm: neutral defaults; or a directory."""
    override_generation_config: dict[str, Any] | None = None
    """Sampling defaults that go before those of ``generation_config``."""
    disable_log_stats: bool = False
    """Without a line on the traffic every ten seconds in which there is some."""
    compilation_cache_dir: str | None = None
    load_format: str = "safetensors"
    token_buckets: tuple[int, ...] | None = None
    """Padded sizes of prefill steps; None: a ladder by device. Fewer compile faster and waste more."""
    row_buckets: tuple[int, ...] | None = None
    """Padded numbers of decoding rows; None: a ladder by device."""

    def __post_init__(self) -> None:
        _choice("--dtype", self.dtype, DTYPES)
        _choice("--attention-backend", self.attention_backend, ATTENTION_BACKENDS)
        _choice("--linear-backend", self.linear_backend, LINEAR_BACKENDS)
        _choice("--load-format", self.load_format, LOAD_FORMATS)
        for flag, value in (
            ("--max-num-seqs", self.max_num_seqs),
            ("--max-num-batched-tokens", self.max_num_batched_tokens),
            ("--num-gpu-blocks-override", self.num_gpu_blocks_override),
            ("--kv-cache-memory-bytes", self.kv_cache_memory),
            ("--max-model-len", self.max_model_len),
        ):
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{flag} must be at least 1, got {value}")
        chunk = self.prefill_chunk_tokens
        if isinstance(chunk, tuple) and not (len(chunk) == 2 and 1 <= chunk[0] <= chunk[1]):
            raise ValueError(f"--prefill-chunk-tokens must be two sizes, the smaller one first, got {chunk}")
        if self.block_size not in (8, 16, 32, 64, 128):
            raise ValueError(f"--block-size must be 8, 16, 32, 64 or 128, got {self.block_size}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"--gpu-memory-utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.swap_space < 0:
            raise ValueError(f"--swap-space must not be negative, got {self.swap_space:g}")
        if self.async_depth not in (None, 1, 2):
            raise ValueError(f"--async-depth must be 1 or 2, got {self.async_depth}")
        if self.tensor_parallel_size != 1:
            raise ValueError("--tensor-parallel-size above 1 is not supported yet")
        if not 0 <= self.max_logprobs <= 1000:
            raise ValueError(f"--max-logprobs must be between 0 and 1000, got {self.max_logprobs}")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP side of a server."""

    engine: EngineConfig
    served_model_name: tuple[str, ...] = ()
    """Names that requests may use; the first is the one in answers. Empty: the model argument as given."""
    host: str = "127.0.0.1"
    port: int = 8000
    api_server_count: int = 1
    """Processes that speak HTTP, in front of the one engine."""
    uds: str | None = None
    """A Unix socket to listen on, in the place of host and port."""
    root_path: str = ""
    """What a proxy in front takes off the paths of requests."""
    api_key: tuple[str, ...] = ()
    """Any of these must be in a request's Authorization header; empty: no key is needed."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may read answers; empty: none."""
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    """``ssl.CERT_NONE``, 1 for optional and 2 for required certificates of clients."""
    chat_template: str | None = None
    """A Jinja file that replaces the model's own template."""
    log_level: str = "info"
    log_json: bool = False
    shutdown_timeout: float = 30.0
    """Seconds that running requests may take to finish after SIGTERM."""
    max_num_queued_reqs: int | None = 1024
    """Requests that may wait for a slot; a call beyond is answered 429. None: no limit. Likewise tokens to compute."""
    max_num_queued_tokens: int | None = None
    max_queue_wait: float | None = None
    """Seconds that a call may be expected to wait for a slot; one that would wait longer is answered 429."""
    request_timeout: float | None = None
    """Seconds after which an answer ends with what it has, waiting included."""
    enable_debug_steps: bool = False
    """GET /debug/steps tells what the last steps computed, for whom."""
    enable_auto_tool_choice: bool = False
    """Models may call tools by themselves; ``tool_call_parser`` says how they write that."""
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    """How the model marks its thoughts: a known name, or START...END."""
    pooling: Pooling = "last"
    """Which hidden states make an embedding."""
    enable_force_include_usage: bool = False
    """Streams end with a usage chunk, asked for or not."""
    enable_per_request_metrics: bool = False
    """Answers carry a ``metrics`` object, plain ones a Server-Timing header too."""
    enable_request_id_headers: bool = False
    """Answers carry an X-Request-Id also where the client sent none."""
    accept_any_model: bool = False
    """Requests may name any model; the one that is served answers."""
    max_body_bytes: int = 32 * 1024 * 1024
    max_choices: int = 128
    """Bound on n and best_of, and on prompts times these of one call (times eight)."""

    def __post_init__(self) -> None:
        _choice("--log-level", self.log_level, LOG_LEVELS)
        _choice("--pooling", self.pooling, POOLINGS)
        if self.tool_call_parser is not None:
            _choice("--tool-call-parser", self.tool_call_parser, TOOL_PARSERS)
        elif self.enable_auto_tool_choice:
            raise ValueError("--enable-auto-tool-choice needs --tool-call-parser")
        if self.reasoning_parser is not None and not re.fullmatch(r".*\S.*\.\.\..*\S.*", self.reasoning_parser):
            _choice("--reasoning-parser", self.reasoning_parser, (*REASONING_PARSERS, "START...END"))
        if any(not name.strip() for name in self.served_model_name):
            raise ValueError("--served-model-name must not be empty")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port must be between 0 and 65535, got {self.port}")
        if not 1 <= self.api_server_count <= MAX_API_SERVERS:
            raise ValueError(f"--api-server-count must be between 1 and {MAX_API_SERVERS}, got {self.api_server_count}")
        if any(not key.strip() for key in self.api_key):
            raise ValueError("--api-key must not be empty")
        if self.root_path and not re.fullmatch(r"(/[^/]+)+", self.root_path):
            raise ValueError(f"--root-path must look like /prefix, got {self.root_path!r}")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ValueError("--ssl-keyfile needs --ssl-certfile")
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ValueError(f"--ssl-cert-reqs must be 0, 1 or 2, got {self.ssl_cert_reqs}")
        if self.shutdown_timeout < 0:
            raise ValueError(f"--shutdown-timeout must not be negative, got {self.shutdown_timeout:g}")
        if self.max_queue_wait is not None and self.max_queue_wait < 0:
            raise ValueError(f"--max-queue-wait must not be negative, got {self.max_queue_wait:g}")
        if self.request_timeout is not None and self.request_timeout <= 0:
            raise ValueError(f"--request-timeout must be positive, got {self.request_timeout:g}")

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.served_model_name or (self.engine.model,)


def _choice(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{flag} must be one of {', '.join(allowed)}, got {value!r}")
