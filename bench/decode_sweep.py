"""Times configurations of the decode attention kernels on a GPU with torch and Triton, without jax in between.

    python bench/decode_sweep.py [--only SUBSTRING] [--configs A396,D528]

bf16, 32 query heads, 8 KV heads, head size 128, blocks of 16 in random order. A CUDA graph holds a call on each of at
least 32 caches (as many layers have), so that the L2 cache does not flatter the figure, and one run of the plan; the
time is the graph's, divided by the calls. TB/s counts keys and values once.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from pallas_kernels import triton_decode as new
from pallas_kernels import triton_decode_plan as plan_module
from pallas_kernels.triton_decode import Tuning

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2
POOL_BYTES = 24 << 30
SCALE = DIM**-0.5

CONFIGS = {
    "A132": Tuning(64, 4, 3, 132),
    "A264": Tuning(64, 4, 3, 264),
    "A396": Tuning(64, 4, 3, 396),
    "A132L": Tuning(64, 4, 3, 132),
    "B132": Tuning(64, 4, 4, 132),
    "B264": Tuning(64, 4, 4, 264),
    "C264": Tuning(32, 4, 4, 264),
    "D264": Tuning(32, 2, 4, 264),
    "D528": Tuning(32, 2, 4, 528),
    "G792": Tuning(16, 1, 5, 792),
    "M132L": Tuning(128, 4, 2, 132),
    "N132L": Tuning(128, 8, 2, 132),
}
"""L: items of at least 128 positions."""

# Name, lengths, positions that the block table is wide for, FlashInfer's TB/s.
CASES: list[tuple[str, list[int], int, float]] = [
    ("1 x 540", [540], 2048, 0),
    ("1 x 540", [540], 131072, 0),
    ("8 x 540", [540] * 8, 2048, 0),
    ("8 x 540", [540] * 8, 131072, 0),
    ("32 x 540", [540] * 32, 2048, 0),
    ("32 x 540", [540] * 32, 131072, 0),
    ("64 x 540", [540] * 64, 2048, 0),
    ("64 x 540", [540] * 64, 131072, 0),
    ("128 x 540", [540] * 128, 2048, 0),
    ("256 x 540", [540] * 256, 2048, 0),
    ("256 x 540", [540] * 256, 131072, 0),
    ("1 x 32768", [32768], 32768, 3.27),
    ("8 x 1024", [1024] * 8, 1024, 2.39),
    ("8 x 8192", [8192] * 8, 8192, 3.83),
    ("32 x 2048", [2048] * 32, 2048, 3.99),
    ("128 x 512", [512] * 128, 512, 3.50),
    ("256 x 2048", [2048] * 256, 2048, 4.38),
    ("ragged 64", [64 + (i * 7919) % 1900 for i in range(64)], 2048, 0),
    ("ragged 256", [64 + (i * 7919) % 1900 for i in range(256)], 2048, 0),
    ("63 x 100, 16000", [100] * 63 + [16000], 16384, 0),
]


class Problem:
    """Operands of a case; caches are slices of one pool."""

    def __init__(self, lengths: list[int], width_tokens: int, pool: torch.Tensor | None, calls: int = 32) -> None:
        torch.manual_seed(0)
        self.lengths = lengths
        self.bytes = sum(lengths) * TOKEN_BYTES
        needed = [-(-n // BLOCK) for n in lengths]
        self.blocks = 1 + sum(needed)
        self.width = width_tokens // BLOCK
        tables = torch.zeros(len(lengths), self.width, dtype=torch.int32)
        order = 1 + torch.randperm(self.blocks - 1).to(torch.int32)
        at = 0
        for row, n in zip(tables, needed, strict=True):
            row[:n] = order[at : at + n]
            at += n
        self.tables = tables.cuda()
        self.lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.q = torch.randn(len(lengths), HEADS, DIM, device="cuda").bfloat16()
        self.out = torch.empty_like(self.q)
        self.ones = torch.ones(1, device="cuda")
        self.caches: list[tuple[torch.Tensor, torch.Tensor]] = []
        if pool is None:
            pool = torch.randn(2 * self.blocks * BLOCK * KV_HEADS * DIM, device="cuda").bfloat16()
        size = self.blocks * BLOCK * KV_HEADS * DIM
        copies = min(max(calls, (256 << 20) // self.bytes), 128, pool.numel() // (2 * size))
        self.calls = max(calls, copies)
        for copy in range(copies):
            k, v = (pool[(2 * copy + i) * size :][:size].view(-1, BLOCK, KV_HEADS, DIM) for i in (0, 1))
            self.caches.append((k, v))

    def reference(self) -> torch.Tensor:
        k_cache, v_cache = self.caches[0]
        rows = []
        for q, table, n in zip(self.q, self.tables, self.lengths, strict=True):
            at = torch.arange(n, device="cuda")
            blocks = table[at // BLOCK].long()
            k, v = (c[blocks, at % BLOCK].float().repeat_interleave(HEADS // KV_HEADS, 1) for c in (k_cache, v_cache))
            scores = torch.einsum("hd,lhd->hl", q.float(), k) * SCALE
            rows.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), v))
        return torch.stack(rows)


Step = tuple[Callable[[], Any], Callable[[torch.Tensor, torch.Tensor], Any], list[Callable[[], Any]]]
"""What is done once, what is done for each cache, and compilations."""


def steps(p: Problem, name: str) -> Step:
    tuning = CONFIGS[name]
    plan_module.LEAST = 128 if name.endswith("L") else 64
    plan = plan_module.launch_plan(
        len(p.lengths), kv_heads=KV_HEADS, programs=tuning.programs, max_seq_len=p.width * BLOCK, window=None,
        split_size=None,
    )  # fmt: skip
    launch = new.launch_decode(
        tuple(p.q.shape), tuple(p.caches[0][0].shape), p.width, plan.max_items, tuning, scale=SCALE, window=None,
        scaled=False, wide=False,
    )  # fmt: skip
    items = torch.empty(plan.items_shape, dtype=torch.int32, device="cuda")
    counters = torch.empty(plan.num_counters, dtype=torch.int32, device="cuda")
    partial = torch.empty(launch.partial_shape, device="cuda")
    lse = torch.empty((*launch.partial_shape[:3], 4), device="cuda")
    options = dict(launch.parameters, num_warps=launch.num_warps, num_stages=launch.num_stages)

    def prepare() -> None:
        plan_module.plan_kernel[(1,)](p.lens, items, counters, **plan.parameters, num_warps=8)

    def decode(k: torch.Tensor, v: torch.Tensor) -> tuple[Any, ...]:
        return (p.q, k, v, p.tables, items, p.ones, p.ones, counters, p.out, partial, lse)

    def run(k: torch.Tensor, v: torch.Tensor) -> None:
        new.decode_kernel[launch.grid](*decode(k, v), **options)

    jobs = [
        lambda: plan_module.plan_kernel.warmup(p.lens, items, counters, grid=(1,), **plan.parameters, num_warps=8),
        lambda: new.decode_kernel.warmup(*decode(*p.caches[0]), grid=launch.grid, **options),
    ]
    return prepare, run, jobs


def time_call(p: Problem, step: Step, replays: int = 5) -> float:
    """Seconds a call, the plan's share included."""
    prepare, run, _ = step
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepare()
        for index in range(p.calls):
            run(*p.caches[index % len(p.caches)])
    times = []
    graph.replay()
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / p.calls)
    return statistics.median(times)


def check(names: list[str]) -> set[str]:
    """The configurations whose results are right, on ragged lengths; says which are wrong."""
    good = set()
    problems = [
        Problem([1, 15, 16, 17, 63, 64, 65, 540, 300, 1000, 2048, 129], 2048, None),
        Problem([0, 5000, 0, 77], 8192, None),
        Problem([1 + i * 5 for i in range(256)], 2048, None),
    ]
    for name in names:
        errors = []
        for p in problems:
            prepare, run, _ = steps(p, name)
            for _ in range(2):  # the second meets the counters that the first left
                p.out.fill_(float("nan"))
                prepare()
                run(*p.caches[0])
                run(*p.caches[0])
                expected = p.reference()
                errors.append(((p.out.float() - expected).abs() / (1 + expected.abs())).max().item())
        right = all(e < 0.01 for e in errors)  # NaN is not
        print(f"check {name}: {'ok' if right else 'WRONG'} {max(errors):.5f}", flush=True)
        if right:
            good.add(name)
    return good


def precompile(names: list[str], problems: list[Problem]) -> None:
    jobs = {}
    for name in names:
        for p in problems:
            for number, job in enumerate(steps(p, name)[2]):
                jobs[name, number, len(p.lengths), p.width] = job

    def compile_one(item: tuple[Any, Callable[[], Any]]) -> None:
        torch.cuda.set_device(0)
        try:
            item[1]()
        except Exception as error:  # shown, and met again by whoever runs it
            print("compile", item[0], type(error).__name__, str(error)[:300], flush=True)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(compile_one, jobs.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--configs", default=",".join(CONFIGS))
    arguments = parser.parse_args()
    names = arguments.configs.split(",")
    began = time.monotonic()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    pool = torch.empty(POOL_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    for part in pool.split(1 << 28):
        part.normal_()
    cases = [c for c in CASES if arguments.only in c[0]]
    problems = [Problem(lengths, width, pool) for _, lengths, width, _ in cases]
    precompile(names, problems)
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    right = check(names)
    good = [name for name in names if name in right]
    print(f"checked after {time.monotonic() - began:.0f} s; us and TB/s", flush=True)
    for (title, *_), p in zip(cases, problems, strict=True):
        if title in ("1 x 540", "256 x 540") and "A396" in good:
            prepare = steps(p, "A396")[0]
            seconds = time_call(p, (lambda: None, lambda k, v, prepare=prepare: prepare(), []))
            print(f"plan {title}, width {p.width}: {seconds * 1e6:.1f} us", flush=True)
    print(f"{'case':>16} {'width':>6} {'peer':>5} " + " ".join(f"{name:>11}" for name in good), flush=True)
    for (title, _, width, peer), p in zip(cases, problems, strict=True):
        cells = []
        for name in good:
            seconds = time_call(p, steps(p, name))
            cells.append(f"{seconds * 1e6:6.1f} {p.bytes / seconds / 1e12:4.2f}")
        print(f"{title:>16} {width:>6} {peer:>5.2f} " + " ".join(cells), flush=True)
    print(f"done after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
