"""Measures the engine without a server: prefill and decode rates by batch size.

    python bench/offline.py [--model demo] [--batches 1,4,16] [--prompt 128] [--output 64] [--json FILE]

Prompts are random token ids, greedy, EOS ignored. Decode time a step is that of the steps that only decode, all
sequences together; prefill is measured on prompts that give a single token.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve.engine.admission import make_requests
from jaxserve.engine.events import StepEvent
from jaxserve.engine.llm import LLM
from jaxserve.request import SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--batches", default="1,4,16", help="numbers of sequences, comma-separated")
    parser.add_argument("--prompt", type=int, default=128, help="tokens a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens an answer")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    batches = [int(b) for b in arguments.batches.split(",")]
    llm = LLM(arguments.model, max_num_seqs=max(16, *batches), progress=report)
    rows = [measure(llm, batch, arguments.prompt, arguments.output) for batch in batches]
    result = {"machine": machine(), "command": " ".join(sys.argv), "startup_seconds": startup(llm), "rows": rows}
    print(f"\n{result['machine']}\n{arguments.model}, {arguments.prompt} tokens in, {arguments.output} out")
    print(f"{'batch':>6} {'ms a decode step':>17} {'tokens/s':>9} {'prefill tokens/s':>17}")
    for row in rows:
        print(
            f"{row['batch']:>6} {row['decode_step_ms']:>17.2f} {row['decode_tokens_s']:>9.1f}"
            f" {row['prefill_tokens_s']:>17.1f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure(llm: LLM, batch: int, prompt: int, output: int) -> dict[str, Any]:
    """One batch size: median time of a decode step, and the prefill rate."""
    prefill = run(llm, batch, prompt, 1)
    seconds = prefill[-1].collected - prefill[0].submitted
    steps = [e.collected - e.submitted for e in run(llm, batch, prompt, output) if e.kind == "decode"]
    step = statistics.median(steps)
    report(f"batch {batch}: {step * 1000:.2f} ms a step")
    return {
        "batch": batch,
        "decode_step_ms": step * 1000,
        "decode_tokens_s": batch / step,
        "prefill_tokens_s": batch * prompt / seconds,
    }


def run(llm: LLM, batch: int, prompt: int, output: int) -> list[StepEvent]:
    """Run ``batch`` requests to their end; returns what each step did."""
    engine = llm.engine
    rng = np.random.default_rng(0)
    engine.events.clear()
    sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    for index in range(batch):
        ids = rng.integers(10, engine.info.vocab_size, prompt).tolist()
        for request in make_requests(f"bench-{index}", ids, sampling, engine.info):
            engine.add_request(request)
    while engine.has_work():
        engine.step()
    return list(engine.events)


def startup(llm: LLM) -> dict[str, float]:
    return dict(getattr(llm.engine.runner, "startup_seconds", {}))


def machine() -> str:
    devices: Iterable[Any] = jax.devices()
    kinds = ", ".join(sorted({d.device_kind for d in devices}))
    return f"{kinds} ({platform.machine()}), jax {version('jax')}, jaxserve {version('jaxserve')}"


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
