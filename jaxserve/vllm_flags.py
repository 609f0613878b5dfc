"""Flags of vLLM's that have no counterpart here: what they ask for is done anyway, or refused with the reason."""

from __future__ import annotations

import argparse
from typing import Any

_LOGS = "prompts and answers are never logged"
_NO_DOWNLOADS = "--model takes a directory, and nothing is downloaded"
_NO_CODE = "no code but jaxserve's own is ever run"
_NO_LORA = "LoRA adapters are not supported yet"
_NO_MEDIA = "images, audio and video are not supported"
_GRAMMARS = "llguidance enforces all grammars and has no settings"
_LOG_LEVEL = "--log-level is for all that is logged; warning leaves out the access log"
_ONE_SERVER = "one engine serves, on one GPU"

SWITCHES: dict[str, tuple[bool | None, str]] = {
    "--async-scheduling": (None, "--async-depth 2 is that, 1 the opposite [CPU 1, GPU 2]"),
    "--disable-fastapi-docs": (False, "/docs is always there"),
    "--disable-log-requests": (True, _LOGS),
    "--disable-uvicorn-access-log": (False, _LOG_LEVEL),
    "--enable-chunked-prefill": (True, "long prompts are always computed in chunks"),
    "--enable-expert-parallel": (False, "models with experts are not supported"),
    "--enable-log-outputs": (False, _LOGS),
    "--enable-log-requests": (False, _LOGS),
    "--enable-lora": (False, _NO_LORA),
    "--enable-prompt-embeds": (False, "prompts are text or token ids"),
    "--enable-prompt-tokens-details": (True, "usage always tells how many tokens were cached"),
    "--enable-server-load-tracking": (True, "/load is always there"),
    "--enable-sleep-mode": (False, "the engine cannot give its memory back"),
    "--enforce-eager": (False, "there is no eager mode; every program is compiled at start"),
    "--exclude-tools-when-tool-choice-none": (True, "tool_choice none never shows the tools"),
    "--headless": (False, _ONE_SERVER),
    "--return-tokens-as-token-ids": (False, "it is a field of requests"),
    "--skip-tokenizer-init": (False, "the server needs its tokenizer"),
    "--trust-remote-code": (False, "nothing from a checkpoint is ever executed"),
    "--trust-request-chat-template": (False, "requests cannot bring templates; --chat-template replaces the model's"),
}
"""Name -> what is done anyway (True: as with the switch; False: as with ``--no-`` in front; None: neither), and why
nothing else can be."""

OPTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "--allowed-local-media-path": ((), _NO_MEDIA),
    "--chat-template-content-format": (("auto", "string"), "templates get the content of a message as one string"),
    "--code-revision": ((), _NO_DOWNLOADS),
    "--compilation-config": ((), "every program is compiled at start; --compilation-cache-dir keeps them"),
    "--config-format": (("auto", "hf"), "models are HuggingFace directories"),
    "--convert": (("auto", "none"), "models are served as they are"),
    "--cpu-offload-gb": (("0",), "weights cannot be offloaded"),
    "--data-parallel-size -dp": (("1",), "data parallelism is not supported yet"),
    "--default-chat-template-kwargs": ((), "chat_template_kwargs is a field of requests"),
    "--device": (("auto",), "JAX takes the GPU where there is one; JAX_PLATFORMS=cpu in the environment forbids that"),
    "--distributed-executor-backend": (("mp", "uni"), _ONE_SERVER),
    "--download-dir": ((), _NO_DOWNLOADS),
    "--guided-decoding-backend": (("auto", "guidance"), _GRAMMARS),
    "--hf-overrides": ((), "overrides of config.json are not supported yet"),
    "--hf-token": ((), _NO_DOWNLOADS),
    "--kv-transfer-config": ((), "the KV cache stays in one process"),
    "--limit-mm-per-prompt": ((), _NO_MEDIA),
    "--log-config-file": ((), "--log-level and --log-json are what can be chosen"),
    "--logits-processors": ((), _NO_CODE),
    "--lora-modules": ((), _NO_LORA),
    "--max-log-len": (("0",), _LOGS),
    "--max-lora-rank": ((), _NO_LORA),
    "--middleware": ((), _NO_CODE),
    "--mm-processor-kwargs": ((), _NO_MEDIA),
    "--model-impl": (("auto",), "each architecture has one implementation"),
    "--otlp-traces-endpoint": ((), "traces are not supported; --enable-per-request-metrics tells where time went"),
    "--pipeline-parallel-size -pp": (("1",), "pipeline parallelism is not supported"),
    "--quantization -q": ((), "quantized weights are not supported yet"),
    "--response-role": (("assistant",), "the role of answers is always assistant"),
    "--revision": ((), _NO_DOWNLOADS),
    "--runner": (("auto", "generate"), "one server answers with text, embeddings and scores"),
    "--speculative-config": ((), "speculative decoding is not supported yet"),
    "--structured-outputs-config": ((), _GRAMMARS),
    "--task": (("auto", "generate"), "one server answers with text, embeddings and scores"),
    "--tokenizer-mode": (("auto", "hf"), "tokenizer.json is what is read"),
    "--tokenizer-revision": ((), _NO_DOWNLOADS),
    "--tool-parser-plugin": ((), _NO_CODE),
    "--uvicorn-log-level": (("info",), _LOG_LEVEL),
}
"""Name and short name -> values that ask for what is done anyway, and why no others can be."""


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that leave nothing in the namespace; help does not show them."""
    for name, (default, reason) in SWITCHES.items():
        opposite = f"--no-{name[2:]}"
        refused = tuple(flag for flag, state in ((name, True), (opposite, False)) if state is not default)
        parser.add_argument(
            name, opposite, action=_NoCounterpart, nargs=0, refused=refused, reason=reason, help=argparse.SUPPRESS
        )
    for names, (values, reason) in OPTIONS.items():
        parser.add_argument(
            *names.split(), action=_NoCounterpart, nargs="+", taken=values, reason=reason, help=argparse.SUPPRESS
        )


class _NoCounterpart(argparse.Action):
    """Refuses what will not be done, since to ignore it would mislead."""

    def __init__(self, *, reason: str, taken: tuple[str, ...] = (), refused: tuple[str, ...] = (), **options: Any):
        super().__init__(**options)
        self._reason, self._taken, self._refused = reason, taken, refused

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        refused = flag in self._refused if self.nargs == 0 else not set(values) <= set(self._taken)
        if refused:
            parser.error(f"{flag}: {self._reason}")
