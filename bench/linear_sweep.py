"""Times the matrix products of a decode step on a GPU, Triton's (many tilings) beside cuBLAS's, with torch and no jax.

    python bench/linear_sweep.py [--rows 1 8 32 64 128] [--shapes qkv o gate_up down lm_head] [--json FILE]

Llama-3.1-8B's shapes in bf16. A CUDA graph calls one product once for each of 32 layers, each with weights of its own,
so that the L2 cache does not flatter the figure. Every tiling's result is compared with a float32 product; the tiling
that serves (``plan_linear``) is marked. Then whole steps (32 layers with norms, rotary embedding and a copy in
attention's place, and the LM head) with cuBLAS, with the tilings that serve, and with the fastest of each product.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import triton
import triton.language as tl

from pallas_kernels.triton_linear import SHARED_BYTES, gated_linear_kernel, linear_kernel, plan_linear
from pallas_kernels.triton_norm import add_rms_norm_kernel, plan_add_rms_norm
from pallas_kernels.triton_rope import plan_rope, rope_kernel

LAYERS, SMS = 32, 132
HIDDEN, KV_HEADS, LANES, DIM = 4096, 8, 6, 128


@dataclass(frozen=True)
class Shape:
    name: str
    K: int
    N: int
    kind: str = "parts"
    copies: int = LAYERS

    @property
    def gated(self) -> bool:
        return self.kind == "gated"

    def out(self, splits: int) -> torch.dtype:
        return torch.float32 if splits > 1 or self.kind == "whole" else torch.bfloat16

    @property
    def columns(self) -> int:
        """Of the weights."""
        return 2 * self.N if self.gated else self.N

    @property
    def weight_bytes(self) -> int:
        return 2 * self.K * self.columns


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qkv", 4096, 6144),
        Shape("o", 4096, 4096),
        Shape("gate_up", 4096, 14336, "gated"),
        Shape("down", 14336, 4096),
        Shape("lm_head", 4096, 128256, "whole", copies=2),
    )
}


@dataclass(frozen=True)
class Tiling:
    m: int
    n: int
    k: int
    splits: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k} splits {self.splits} warps {self.warps} stages {self.stages}"


def serving(shape: Shape, rows: int) -> Tiling:
    """What the product uses."""
    plan = plan_linear(shape.kind, rows, shape.K, shape.N)
    assert plan
    m, n, k = (plan.parameters[f"BLOCK_{axis}"] for axis in "MNK")
    return Tiling(m, n, k, plan.splits, plan.options["num_warps"], plan.options["num_stages"])


def tilings(shape: Shape, rows: int, limit: int) -> list[Tiling]:
    """Those worth trying: all programs resident at once, near the number of multiprocessors, with much in flight."""
    found: dict[tuple[int, int, int], list[tuple[float, Tiling]]] = {}
    pair = 2 if shape.gated else 1
    m = max(16, triton.next_power_of_2(rows))
    for n, k, resident in itertools.product((64, 128, 256), (64, 128, 32), (2, 3, 4, 1)):
        if shape.N % n or shape.K % k:
            continue
        stage = (pair * n + m) * k * 2
        stages = min(10, (SHARED_BYTES // resident - 1024) // stage)
        accumulators = pair * n * m // 128
        warps = 4 if accumulators <= 128 else 8
        registers = accumulators * 4 // warps + 48
        if stages < 3 or registers > 255 or resident * warps * 32 * registers > 65536:
            continue
        tiles = shape.N // n
        splits = 1
        if shape.kind == "parts":
            splits = max(1, min(SMS * resident // tiles, shape.K // k // 4, max(1, shape.K // (8 * rows))))
        stages = min(stages, shape.K // k // splits)
        waves = tiles * splits / (SMS * resident)
        if waves > 1 and splits > 1:
            continue
        in_flight = resident * min(1.0, waves) * (stages - 1) * pair * n * k * 2
        score = min(1.0, in_flight / (128 << 10)) * min(1.0, (pair * n + m) / 128)
        if waves < 0.8:
            score *= waves
        elif waves > 1:  # others must cover for a program that starts
            score *= (waves / -(-waves // 1)) * (0.7 if resident == 1 else 1)
        found.setdefault((m, n, k), []).append((score, Tiling(m, n, k, splits, warps, stages)))
    for group in found.values():
        group.sort(key=lambda pair: -pair[0])
    best_first = sorted(found.values(), key=lambda group: -group[0][0])
    ranked = [t for turn in itertools.zip_longest(*best_first) for _, t in filter(None, turn)]
    return list(dict.fromkeys([serving(shape, rows), *ranked]))[:limit]


def launch(shape: Shape, tiling: Tiling, x: Any, w: Any, out: Any, warmup: bool = False) -> None:
    """``out[SPLITS, M, N]`` of ``x[M, K] @ w[K, N]``."""
    kernel = gated_linear_kernel if shape.gated else linear_kernel
    run = partial(kernel.warmup, grid=(1, 1)) if warmup else kernel[shape.N // tiling.n, tiling.splits]
    run(
        x, w, out.shape[-2] - 1, shape.K // tiling.k, out, BLOCK_M=tiling.m, BLOCK_N=tiling.n, BLOCK_K=tiling.k,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip


type Job = tuple[str, Tiling]


def compile_one(job: Job) -> str:
    """In a process of its own: fills Triton's cache on disk. Only types and alignments matter, not sizes."""
    name, tiling = job
    shape, some = SHAPES[name], torch.empty(64, 64, dtype=torch.bfloat16, device="cuda")
    try:
        launch(shape, tiling, some, some, some.to(shape.out(tiling.splits)), warmup=True)
    except Exception as error:  # a tiling that does not fit is a result
        return f"{name} {tiling}: {error!r:.200}"
    return ""


def compile_all(pool: ProcessPoolExecutor, jobs: set[Job]) -> None:
    start = time.monotonic()
    for failure in filter(None, pool.map(compile_one, sorted(jobs, key=str))):
        print("  does not compile:", failure)
    print(f"  {len(jobs)} kernels compiled in {time.monotonic() - start:.0f} s", flush=True)


def time_graph(call: Callable[[], None], calls: int, replays: int = 5) -> float:
    """Seconds for one of the ``calls`` that ``call`` makes, from replays of its CUDA graph; the median."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(2):
        graph.replay()
    seconds = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / calls)
    return sorted(seconds)[len(seconds) // 2]


def make_weights(shapes: list[Shape]) -> dict[str, list[torch.Tensor]]:
    return {
        s.name: [
            torch.randn(s.K, s.columns, dtype=torch.bfloat16, device="cuda").mul_(s.K**-0.5) for _ in range(s.copies)
        ]
        for s in shapes
    }


def expected(shape: Shape, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x.float() @ w.float()
    if not shape.gated:
        return y
    gate, up = y.bfloat16().float().split(shape.N, dim=1)
    return torch.nn.functional.silu(gate) * up


def cublas(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> None:
    torch.mm(x, w, out=out)


def cublas_out(shape: Shape, rows: int) -> torch.Tensor:
    return torch.empty(rows, shape.columns, dtype=torch.bfloat16, device="cuda")


@dataclass(frozen=True)
class Result:
    shape: str
    rows: int
    tiling: Tiling
    seconds: float
    error: float


def sweep(shape: Shape, rows: int, weights: list[torch.Tensor], limit: int) -> list[Result]:
    x = torch.randn(rows, shape.K, dtype=torch.bfloat16, device="cuda")
    want = expected(shape, x, weights[0])
    results = []
    for tiling in tilings(shape, rows, limit):
        out = torch.full((tiling.splits, rows, shape.N), float("nan"), dtype=shape.out(tiling.splits), device="cuda")
        try:
            launch(shape, tiling, x, weights[0], out)
            error = ((out.float().sum(0) - want).norm() / want.norm()).item()
            calls = lambda t=tiling, out=out: [launch(shape, t, x, w, out) for w in weights]  # noqa: E731
            seconds = time_graph(calls, len(weights))
        except Exception as failure:
            print(f"  {shape.name} {rows} {tiling}: {failure!r:.200}")
            continue
        if not error < (5e-3 if out.dtype == torch.bfloat16 else 1e-4):
            print(f"  WRONG {shape.name} {rows} {tiling}: relative error {error:.1e}")
            continue
        results.append(Result(shape.name, rows, tiling, seconds, error))
    return sorted(results, key=lambda r: r.seconds)


@triton.jit
def _silu_kernel(gate_up_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up_ptr + row * 2 * N + column).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * N + N + column).to(tl.float32)
    tl.store(out_ptr + row * N + column, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty))


@triton.jit
def _copy_kernel(source_ptr, target_ptr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(target_ptr + at, tl.load(source_ptr + at))


class Step:
    """A decode step but for attention, with cuBLAS (no ``best``) or with these tilings."""

    def __init__(self, rows: int, weights: dict[str, list[torch.Tensor]], best: dict[str, Tiling]) -> None:
        self.rows, self.weights, self.best = rows, weights, best
        bf16 = dict(dtype=torch.bfloat16, device="cuda")
        self.x, self.normed, self.q, self.attended = (torch.randn(rows, HIDDEN, **bf16) for _ in range(4))
        self.inner = torch.empty(rows, SHAPES["gate_up"].N, **bf16)
        self.norm_weight = torch.ones(HIDDEN, **bf16)
        self.caches = [torch.zeros(rows, KV_HEADS, DIM, **bf16) for _ in range(2)]
        self.cos, self.sin = (torch.rand(rows, DIM // 2, device="cuda") for _ in range(2))
        self.slots = torch.arange(rows, dtype=torch.int32, device="cuda")
        self.outs = {name: self.make_out(shape) for name, shape in SHAPES.items()}

    def make_out(self, shape: Shape) -> torch.Tensor:
        if not self.best:
            return cublas_out(shape, self.rows).zero_()
        splits = self.best[shape.name].splits
        return torch.zeros(splits, self.rows, shape.N, dtype=shape.out(splits), device="cuda")

    def parts(self, name: str) -> int:
        return self.best[name].splits if self.best else 1

    def linear(self, name: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        shape, w, out = SHAPES[name], self.weights[name][layer], self.outs[name]
        if not self.best:
            cublas(x, w, out)
        else:
            launch(shape, self.best[name], x, w, out)
        return out

    def norm(self, delta: torch.Tensor, parts: int) -> None:
        grid, parameters = plan_add_rms_norm((parts, *self.x.shape), 1e-5)
        add_rms_norm_kernel[grid](
            self.x, delta, self.norm_weight, self.x, self.normed, **parameters, num_warps=8, num_stages=3
        )

    def run(self) -> None:
        delta, parts = self.outs["down"], self.parts("down")
        for layer in range(LAYERS):
            self.norm(delta, parts)
            qkv = self.linear("qkv", layer, self.normed)
            grid, parameters = plan_rope((self.parts("qkv"), self.rows, KV_HEADS, LANES, DIM))
            rope_kernel[grid](
                qkv, self.cos, self.sin, self.slots, *self.caches, self.q, **parameters, num_warps=1, num_stages=3
            )
            _copy_kernel[(self.rows * 8,)](self.q, self.attended, SIZE=512)
            self.norm(self.linear("o", layer, self.attended), self.parts("o"))
            hidden = self.linear("gate_up", layer, self.normed)
            if not self.best:
                _silu_kernel[(self.rows, 14)](hidden, self.inner, N=14336, BLOCK=1024)
                hidden = self.inner
            delta = self.linear("down", layer, hidden)
        self.norm(delta, parts)
        self.linear("lm_head", 0, self.normed)


def steps(rows: int, weights: dict[str, list[torch.Tensor]], best: dict[str, Tiling]) -> dict[str, float]:
    """Milliseconds a step."""
    served = {name: serving(shape, rows) for name, shape in SHAPES.items()}
    kinds = {"cuBLAS": {}, "serving": served, "fastest products": best}
    return {kind: 1e3 * time_graph(Step(rows, weights, chosen).run, 1, 9) for kind, chosen in kinds.items()}


def measure(rows: int, shapes: list[Shape], weights: dict[str, list[torch.Tensor]], arguments: Any) -> dict:
    print(f"rows {rows}")
    best, found = {}, []
    for shape in shapes:
        results = sweep(shape, rows, weights[shape.name], arguments.limit)
        x, out = torch.randn(rows, shape.K, dtype=torch.bfloat16, device="cuda"), cublas_out(shape, rows)
        peer = time_graph(lambda: [cublas(x, w, out) for w in weights[shape.name]], shape.copies)  # noqa: B023
        found += [{**asdict(r), "cublas": peer} for r in results]
        print(f"  {shape.name:8} {peer * 1e6:7.1f} us {shape.weight_bytes / peer / 1e12:5.2f} TB/s  cuBLAS")
        served = serving(shape, rows)
        for place, r in enumerate(results):
            if place < arguments.show or r.tiling == served:
                rate, mark = shape.weight_bytes / r.seconds / 1e12, "  serving" if r.tiling == served else ""
                print(f"  {shape.name:8} {r.seconds * 1e6:7.1f} us {rate:5.2f} TB/s  {r.tiling}{mark}")
        if results:
            best[shape.name] = results[0].tiling
    report = {"rows": rows, "products": found}
    if len(best) == len(SHAPES):
        report["steps"] = steps(rows, weights, best)
        print("  step, ms:", ", ".join(f"{name} {value:.3f}" for name, value in report["steps"].items()))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--limit", type=int, default=12, help="tilings tried for a shape and number of rows")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--show", type=int, default=3, help="tilings printed of each shape and number of rows")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    start = time.monotonic()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    shapes = [SHAPES[name] for name in arguments.shapes]
    jobs = {(s.name, t) for s in shapes for rows in arguments.rows for t in tilings(s, rows, arguments.limit)}
    report = []
    with ProcessPoolExecutor(arguments.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        compile_all(pool, jobs)
    weights = make_weights(shapes)
    for rows in arguments.rows:
        report.append(measure(rows, shapes, weights, arguments))
        print(f"  after {time.monotonic() - start:.0f} s", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
