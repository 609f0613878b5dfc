"""Times the matrix products of a decode step on a GPU, Triton's (many tilings) beside cuBLAS's, with torch and no jax.

    python bench/linear_sweep.py [--rows 1 8 32 64 128 256] [--shapes qkv o gate_up down lm_head] [--json FILE]

Llama-3.1-8B's shapes in bf16. A CUDA graph calls one product once for each of 32 layers, each with weights of its own,
so that the L2 cache does not flatter the figure. Every tiling's result is compared with a float32 product. Then whole
steps (32 layers with norms, rotary embedding and a copy in attention's place, and the LM head) with cuBLAS, with the
best tilings, and with those when each product's end prefetches the next one's weights.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pallas_kernels.triton_linear import gated_linear_kernel, linear_kernel
from pallas_kernels.triton_norm import add_rms_norm_kernel, plan_add_rms_norm
from pallas_kernels.triton_rope import plan_rope, rope_kernel

LAYERS, SMS, SHARED_BYTES = 32, 132, 227 << 10
HIDDEN, KV_HEADS, LANES, DIM = 4096, 8, 6, 128


@dataclass(frozen=True)
class Shape:
    name: str
    K: int
    N: int
    gated: bool = False
    copies: int = LAYERS
    out: torch.dtype = torch.float32

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
        Shape("gate_up", 4096, 14336, gated=True, out=torch.bfloat16),
        Shape("down", 14336, 4096),
        Shape("lm_head", 4096, 128256, copies=2),
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
    resident: int
    """Programs a multiprocessor that the shared memory was shared out for."""
    swap: bool = True
    tma: bool = True

    def grid(self, shape: Shape, rows: int) -> tuple[int, int, int]:
        return -(-rows // self.m), shape.N // self.n, self.splits

    def __str__(self) -> str:
        kind = ("swap" if self.swap else "mma") + (" tma" if self.tma else " ptr")
        return f"{self.m}x{self.n}x{self.k} splits {self.splits} warps {self.warps} stages {self.stages} {kind}"


def tilings(shape: Shape, rows: int, limit: int) -> list[Tiling]:
    """Those worth trying: all programs resident at once, near the number of multiprocessors, with much in flight."""
    found: dict[tuple[int, int, int], list[tuple[float, Tiling]]] = {}
    pair = 2 if shape.gated else 1
    heights = {max(16, triton.next_power_of_2(rows))} | ({128} if rows > 128 else set())
    for m, n, k, resident in itertools.product(sorted(heights), (32, 64, 128, 256), (64, 128, 32), (2, 3, 4, 1, 6)):
        if shape.N % n or shape.K % k or n * pair < 64 or (n < 64 and not shape.gated):
            continue
        if n < 64:  # the tensor cores of Hopper take 64 columns of weights or more
            continue
        stage = (pair * n + m) * k * 2
        stages = min(10, (SHARED_BYTES // resident - 2048) // stage)
        accumulators = pair * n * m // 128
        warps = 4 if accumulators <= 128 else 8
        registers = accumulators * 4 // warps + 48
        if stages < 3 or registers > 255 or resident * warps * 32 * registers > 65536:
            continue
        tiles = shape.N // n * -(-rows // m)
        splits = 1
        if not shape.gated and shape.name != "lm_head":
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
        found.setdefault((m, n, k), []).append((score, Tiling(m, n, k, splits, warps, stages, resident)))
    for group in found.values():
        group.sort(key=lambda pair: -pair[0])
    best_first = sorted(found.values(), key=lambda group: -group[0][0])
    ranked = [t for turn in itertools.zip_longest(*best_first) for _, t in filter(None, turn)]
    ranked = ranked[: limit - (4 if rows <= 64 else 2)]
    pointers = [Tiling(**{**asdict(t), "tma": False}) for t in ranked[:2]]
    plain = [Tiling(**{**asdict(t), "tma": False, "swap": False}) for t in ranked[:2] if rows <= 64]
    return ranked + pointers + plain


@dataclass(frozen=True)
class Ahead:
    """What a product prefetches at its end: ``share`` bytes a thread of weights to be read in ``splits`` stretches that
    are ``stride`` bytes apart."""

    splits: int
    stride: int
    share: int


def launch(
    shape: Shape, tiling: Tiling, x: Any, w: Any, out: Any, ahead: Ahead | None = None, after: Any = None,
    warmup: bool = False,
) -> None:  # fmt: skip
    """``out[SPLITS, M, N]`` of ``x[M, K] @ w[K, N]``; ``after``: the next product's weights."""
    rows = out.shape[-2]
    operands = (x, w)
    if tiling.tma:
        operands = (
            TensorDescriptor(x, [rows, shape.K], [shape.K, 1], [tiling.m, tiling.k]),
            TensorDescriptor(w, [shape.K, shape.columns], [shape.columns, 1], [tiling.k, tiling.n]),
        )
    ahead = ahead or Ahead(1, 0, 0)
    parameters = dict(
        N=shape.N, K=shape.K, BLOCK_M=tiling.m, BLOCK_N=tiling.n, BLOCK_K=tiling.k, SWAP=tiling.swap, TMA=tiling.tma,
        PREFETCH=ahead.share, NEXT_SPLITS=ahead.splits, NEXT_STRIDE=ahead.stride, THREADS=32 * tiling.warps,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    kernel = gated_linear_kernel if shape.gated else linear_kernel
    if not shape.gated:
        parameters["SPLITS"] = tiling.splits
    arguments = (*operands, x if after is None else after, out, rows)
    grid = tiling.grid(shape, rows)
    if warmup:
        kernel.warmup(*arguments, grid=grid, **parameters)
    else:
        kernel[grid](*arguments, **parameters)


type Job = tuple[str, Tiling, Ahead | None]


def compile_one(job: Job) -> str:
    """In a process of its own: fills Triton's cache on disk. Only types and alignments matter, not sizes."""
    name, tiling, ahead = job
    shape, some = SHAPES[name], torch.empty(64, 64, dtype=torch.bfloat16, device="cuda")
    try:
        launch(shape, tiling, some, some, torch.empty(64, 64, dtype=shape.out, device="cuda"), ahead, warmup=True)
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
        out = torch.full((tiling.splits, rows, shape.N), float("nan"), dtype=shape.out, device="cuda")
        try:
            launch(shape, tiling, x, weights[0], out)
            error = ((out.float().sum(0) - want).norm() / want.norm()).item()
            calls = lambda t=tiling, out=out: [launch(shape, t, x, w, out) for w in weights]  # noqa: E731
            seconds = time_graph(calls, len(weights))
        except Exception as failure:
            print(f"  {shape.name} {rows} {tiling}: {failure!r:.200}")
            continue
        if not error < (5e-3 if shape.out == torch.bfloat16 else 1e-4):
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


# Each product's successor; the LM head has none (sampling follows).
ORDER = [(name, layer) for layer in range(LAYERS) for name in ("qkv", "o", "gate_up", "down")] + [("lm_head", 0)]
AFTER = dict(itertools.pairwise(ORDER))


def ahead_of(name: str, layer: int, best: dict[str, Tiling], rows: int, size: int) -> Ahead | None:
    """How a product prefetches about ``size`` bytes for the one after it."""
    if not size or (name, layer) not in AFTER:
        return None
    programs, (after, _) = math.prod(best[name].grid(SHAPES[name], rows)), AFTER[name, layer]
    share = -(-size // (programs * best[name].warps * 32) // 16) * 16
    splits = best[after].splits
    return Ahead(splits, SHAPES[after].weight_bytes // splits // 128 * 128, share)


class Step:
    """A decode step but for attention, with cuBLAS (no ``best``) or with these tilings."""

    def __init__(self, rows: int, weights: dict[str, list[torch.Tensor]], best: dict[str, Tiling], ahead: int) -> None:
        self.rows, self.weights, self.best, self.ahead = rows, weights, best, ahead
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
        return torch.zeros(self.best[shape.name].splits, self.rows, shape.N, dtype=shape.out, device="cuda")

    def parts(self, name: str) -> int:
        return self.best[name].splits if self.best else 1

    def linear(self, name: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        shape, w, out = SHAPES[name], self.weights[name][layer], self.outs[name]
        if not self.best:
            cublas(x, w, out)
            return out
        after = AFTER.get((name, layer))
        next_weights = self.weights[after[0]][after[1]] if after else None
        ahead = ahead_of(name, layer, self.best, self.rows, self.ahead)
        launch(shape, self.best[name], x, w, out, ahead, next_weights)
        return out

    def norm(self, delta: torch.Tensor, parts: int) -> None:
        grid, parameters = plan_add_rms_norm(self.x.shape, 1e-5, parts)
        add_rms_norm_kernel[grid](
            self.x, delta, self.norm_weight, self.x, self.normed, **parameters, num_warps=8, num_stages=3
        )

    def run(self) -> None:
        delta, parts = self.outs["down"], self.parts("down")
        for layer in range(LAYERS):
            self.norm(delta, parts)
            qkv = self.linear("qkv", layer, self.normed)
            grid, parameters = plan_rope((self.rows, KV_HEADS, LANES, DIM), self.parts("qkv"))
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


def steps(
    rows: int, weights: dict[str, list[torch.Tensor]], best: dict[str, Tiling], sizes: list[int], pool: Any
) -> dict[str, float]:
    """Milliseconds a step; ``sizes``: MiB that each product prefetches."""
    aheads = [(n, best[n], ahead_of(n, i, best, rows, size << 20)) for size in sizes for n, i in ORDER]
    compile_all(pool, set(aheads))
    ms = {"cuBLAS": 1e3 * time_graph(Step(rows, weights, {}, 0).run, 1, 9)}
    for size in sizes:
        ms[f"ahead {size} MiB"] = 1e3 * time_graph(Step(rows, weights, best, size << 20).run, 1, 9)
    return ms


def measure(rows: int, shapes: list[Shape], weights: dict[str, list[torch.Tensor]], arguments: Any, pool: Any) -> dict:
    print(f"rows {rows}")
    best, found = {}, []
    for shape in shapes:
        results = sweep(shape, rows, weights[shape.name], arguments.limit)
        x, out = torch.randn(rows, shape.K, dtype=torch.bfloat16, device="cuda"), cublas_out(shape, rows)
        peer = time_graph(lambda: [cublas(x, w, out) for w in weights[shape.name]], shape.copies)  # noqa: B023
        found += [{**asdict(r), "cublas": peer} for r in results]
        print(f"  {shape.name:8} {peer * 1e6:7.1f} us {shape.weight_bytes / peer / 1e12:5.2f} TB/s  cuBLAS")
        for r in results[: arguments.show]:
            rate = shape.weight_bytes / r.seconds / 1e12
            print(f"  {shape.name:8} {r.seconds * 1e6:7.1f} us {rate:5.2f} TB/s  {r.tiling}  x{r.tiling.resident}")
        if results:
            best[shape.name] = results[0].tiling
    report = {"rows": rows, "products": found}
    if len(best) == len(SHAPES):
        report["steps"] = steps(rows, weights, best, arguments.ahead, pool)
        print("  step, ms:", ", ".join(f"{name} {value:.3f}" for name, value in report["steps"].items()))
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--limit", type=int, default=12, help="tilings tried for a shape and number of rows")
    parser.add_argument("--ahead", type=int, nargs="*", default=[0, 4, 8, 16, 24], help="MiB prefetched by a product")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--show", type=int, default=3, help="tilings printed of each shape and number of rows")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    start = time.monotonic()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__)
    shapes = [SHAPES[name] for name in arguments.shapes]
    jobs = {(s.name, t, None) for s in shapes for rows in arguments.rows for t in tilings(s, rows, arguments.limit)}
    report = []
    with ProcessPoolExecutor(arguments.processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        compile_all(pool, jobs)
        weights = make_weights(shapes)
        for rows in arguments.rows:
            report.append(measure(rows, shapes, weights, arguments, pool))
            print(f"  after {time.monotonic() - start:.0f} s", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
