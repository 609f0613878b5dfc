"""Measures the engine without a server: decode steps by batch size, prefill, and a mixed workload.

    python bench/offline.py                          # the demo model
    python bench/offline.py --model 8B               # on a GPU: the shape of Llama-3.1-8B, random weights, bf16

Prompts are random token ids and EOS is ignored. The time a token is that of whole answers less that of their first
tokens, all sequences together, over the tokens after the first; "sampled" draws with temperature, top-k and top-p on.
The step is the median of those that decode all sequences; its floor is the larger of the bytes it must read over the
measured read bandwidth and its operations over the measured rate, both of one H200.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import numpy as np

from bench.shapes import LLAMA_8B_CONFIG
from jaxserve import collector
from jaxserve.config import EngineConfig
from jaxserve.demo import demo_model_directory
from jaxserve.engine.admission import make_requests
from jaxserve.engine.core import EngineCore
from jaxserve.engine.llm import longest_first
from jaxserve.models.config import ModelConfig
from jaxserve.models.kv_cache import bytes_per_block
from jaxserve.request import EngineRequest, SamplingParams
from jaxserve.runner import backend

READ_BYTES_S, FLOPS = 4.55e12, 800e12
"""Measured on one H200."""
VLLM_TPOT_MS = {1: 4.94, 8: 5.21, 32: 5.80, 128: 8.48, 256: 13.43}
VLLM_PREFILL, VLLM_MIXED = 43_700, 10_300
"""vLLM 0.26 on one H200, the 8B shape in bf16: TPOT by batch; prefill tokens/s; output tokens/s of the 512 requests."""

FEW = 64
"""Up to so many sequences are measured three times, since prompts alone differ by ten milliseconds a run."""
Order = Callable[[list[EngineRequest]], list[EngineRequest]]
ORDERS: dict[str, Order] = {"in the order given": list, "longest first, as LLM does": longest_first}
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}


@dataclass(frozen=True)
class Lengths:
    prompt: int
    output: int


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo", help="demo, 8B (random weights), or a model directory")
    parser.add_argument("--batches", help="numbers of sequences [1,4,16; 8B: 1,8,32,64,128,256]")
    parser.add_argument("--prompt", type=int, help="tokens a prompt [128; 8B: 512]")
    parser.add_argument("--output", type=int, help="tokens an answer [64; 8B: 128]")
    parser.add_argument("--mixed", action="store_true", help="also the 512 requests of log-normal lengths")
    parser.add_argument("--options", default="{}", help="more EngineConfig fields, as JSON")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    large = arguments.model == "8B"
    batches = [int(b) for b in (arguments.batches or ("1,8,32,64,128,256" if large else "1,4,16")).split(",")]
    lengths = Lengths(arguments.prompt or (512 if large else 128), arguments.output or (128 if large else 64))
    with model_directory(arguments.model) as directory:
        options: dict[str, Any] = dict(max_num_seqs=max(16, *batches), max_model_len=2048 if large else None)
        options["prefill_chunk_tokens"] = "all"  # as class LLM has it: nobody reads along
        if large:
            options["load_format"] = "dummy"
        options |= {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(arguments.options).items()}
        config = EngineConfig(model=arguments.model, **options)
        backend.configure(config)
        start = time.monotonic()
        engine = EngineCore.load(config, directory, report)
        collector.freeze()  # as the server's engine process does
        result: dict[str, Any] = {"machine": machine(), "command": " ".join(sys.argv)}
        result["startup_seconds"] = {**engine.runner.startup_seconds, "total": time.monotonic() - start}
        result["rows"] = [measure(engine, batch, lengths) for batch in batches]
        result["prefill_tokens_s"] = prefill_rate(engine, lengths.prompt)
        if arguments.mixed:
            result["mixed"] = {name: mixed(engine, order) for name, order in ORDERS.items()}
    show(result, arguments.model, lengths, large)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


@contextmanager
def model_directory(name: str) -> Iterator[Path]:
    if name == "8B":
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "config.json").write_text(json.dumps(LLAMA_8B_CONFIG), encoding="utf-8")
            yield Path(directory)
    else:
        yield demo_model_directory(progress=report) if name == "demo" else Path(name)


def measure(engine: EngineCore, batch: int, lengths: Lengths) -> dict[str, Any]:
    """Milliseconds a token after the first, greedy and sampled; a full decode step's; and the floor of that."""
    row: dict[str, Any] = {"batch": batch, "floor_ms": floor_seconds(engine, batch, lengths) * 1000}
    for name, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
        run(engine, [Lengths(lengths.prompt, 2)] * batch, sampling)  # what runs first may be slow
        rest = []
        for _ in range(3 if batch <= FEW else 1):
            first = run(engine, [Lengths(lengths.prompt, 1)] * batch, sampling)
            rest.append(run(engine, [lengths] * batch, sampling) - first)
        row[f"{name}_ms"] = float(np.median(rest)) / (lengths.output - 1) * 1000
        full = [e.collected for e in engine.events if len(e.decode_requests) == batch and not e.prefill_requests]
        row[f"{name}_step_ms"] = float(np.median(np.diff(full))) * 1000
        row[f"{name}_slowest_step_ms"] = float(np.max(np.diff([e.collected for e in engine.events]))) * 1000
    report(f"batch {batch}: {row}")
    return row


def prefill_rate(engine: EngineCore, prompt: int) -> float:
    """Prompt tokens a second, over prompts that give one token each."""
    count = max(4, 8 * engine.runner.plan.max_num_batched_tokens // prompt)
    run(engine, [Lengths(prompt, 1)] * count, GREEDY)
    seconds = run(engine, [Lengths(prompt, 1)] * count, GREEDY)
    return count * prompt / seconds


def mixed(engine: EngineCore, order: Order) -> dict[str, Any]:
    """512 requests of log-normal lengths, all there from the start."""
    rng = np.random.default_rng(0)
    inputs = np.clip(np.exp(rng.normal(5.2, 0.9, 512)), 16, 1024).astype(int)
    outputs = np.clip(np.exp(rng.normal(5.1, 0.8, 512)), 8, 512).astype(int)
    work = [Lengths(int(i), int(o)) for i, o in zip(inputs, outputs, strict=True)]
    seconds = run(engine, work, GREEDY, order)
    rate = float(outputs.sum() / seconds)
    return {"seconds": seconds, "output_tokens": int(outputs.sum()), "output_tokens_s": rate, "steps": spent(engine)}


def spent(engine: EngineCore) -> dict[str, dict[str, float]]:
    """Of the steps in the event log, by bucket: how many, how long from the end of the one before, how full, and the
    host's time to schedule and submit one."""
    sums: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(("steps", "seconds", "tokens", "host_ms"), 0))
    before = None
    for event in engine.events:
        step = sums[event.bucket]
        step["steps"] += 1
        step["seconds"] += event.collected - (before or event.submitted)
        step["tokens"] += event.num_tokens
        step["host_ms"] += 1000 * (event.schedule_seconds + event.submit_seconds)
        before = event.collected
    for step in sums.values():
        step["tokens"] /= step["steps"]
        step["host_ms"] /= step["steps"]
    return dict(sums)


def run(engine: EngineCore, work: list[Lengths], sampling: dict[str, Any], order: Order = list) -> float:
    """Run requests to their end, in this order; returns the seconds it took."""
    rng = np.random.default_rng(0)
    high = min(128000, engine.info.vocab_size)
    requests = []
    for index, lengths in enumerate(work):
        params = SamplingParams(**sampling, max_tokens=lengths.output, ignore_eos=True, seed=index)
        ids = rng.integers(10, high, lengths.prompt).tolist()
        requests += make_requests(f"bench-{index}", ids, params, engine.info)
    engine.reset_prefix_cache()  # the same prompts may have run before
    engine.events.clear()
    start = time.monotonic()
    for request in order(requests):
        engine.add_request(request)
    while engine.has_work():
        engine.step()
    return time.monotonic() - start


def floor_seconds(engine: EngineCore, batch: int, lengths: Lengths) -> float:
    """Of one decode step, at the middle of the answers."""
    runner = engine.runner
    model: ModelConfig = runner.model_config
    params = matmul_params(model)
    tokens = batch * (lengths.prompt + lengths.output / 2)
    per_token = bytes_per_block(model, 1, runner.plan.dtype)
    read = params * runner.plan.dtype.itemsize + tokens * per_token
    return max(read / READ_BYTES_S, 2 * params * batch / FLOPS)


def matmul_params(model: ModelConfig) -> int:
    """Parameters that every token is multiplied with."""
    qkv = model.hidden_size * (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    o = model.num_heads * model.head_dim * model.hidden_size
    return model.num_layers * (qkv + o + 3 * model.hidden_size * model.intermediate_size) + (
        model.hidden_size * model.vocab_size
    )


def show(result: dict[str, Any], model: str, lengths: Lengths, large: bool) -> None:
    """The table; beside the 8B shape's figures those of vLLM."""
    print(f"\n{result['machine']}\n{result['command']}")
    print(f"{model}: {lengths.prompt} tokens in, {lengths.output} out")
    print(f"start to ready {result['startup_seconds']['total']:.1f} s")
    print("ms a token after the first, all sequences together (whole answers less their first tokens); a decode step")
    columns = f"{'batch':>6} {'greedy':>8} {'sampled':>8} {'step':>7} {'tokens/s':>9}"
    print(columns + (f" {'floor':>7} {'x floor':>8} {'vLLM':>6}" if large else ""))
    for row in result["rows"]:
        batch, greedy = row["batch"], row["greedy_ms"]
        line = f"{batch:>6} {greedy:>8.2f} {row['sampled_ms']:>8.2f} {row['greedy_step_ms']:>7.2f}"
        line += f" {batch / greedy * 1000:>9.1f}"
        if large:
            line += f" {row['floor_ms']:>7.2f} {greedy / row['floor_ms']:>8.2f} {VLLM_TPOT_MS.get(batch, ''):>6}"
        print(line)
    print(f"prefill: {result['prefill_tokens_s']:.0f} tokens/s" + (f" (vLLM {VLLM_PREFILL})" if large else ""))
    for order, figures in result.get("mixed", {}).items():
        vllm = f" (vLLM, in the order given, {VLLM_MIXED})" if large else ""
        rate, seconds = figures["output_tokens_s"], figures["seconds"]
        print(f"512 requests {order}: {rate:.0f} output tokens/s in {seconds:.2f} s{vllm}")
        print(f"{'of these, steps':>24} {'number':>7} {'seconds':>8} {'ms each':>8} {'tokens':>7} {'host ms':>8}")
        for bucket, step in sorted(figures["steps"].items(), key=lambda item: -item[1]["seconds"]):
            each = step["seconds"] / step["steps"] * 1000
            print(
                f"{bucket:>24} {step['steps']:>7} {step['seconds']:>8.2f} {each:>8.2f} {step['tokens']:>7.0f}"
                f" {step['host_ms']:>8.2f}"
            )


def machine() -> str:
    kinds = ", ".join(sorted({d.device_kind for d in jax.devices()}))
    return f"{kinds} ({platform.machine()}), jax {version('jax')}, Python {platform.python_version()}"


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
