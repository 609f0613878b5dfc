"""What the kernels of a decode step take of a GPU's energy, each by itself in a loop.

    python bench/energy.py [--rows 128 256] [--zeros]

A layer of Llama-3.1-8B's shape, bf16, sequences of 576 tokens. Energy is the driver's count, the card at rest included.
Each loop runs long enough for the power limit to show: where power is at the limit, time is energy. Reading keys and
values and keeping only their largest says what attention cannot do without.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from bench import kernels
from bench.offline import machine
from jaxserve.runner.programs import UNTUNED

Array = jax.Array

PRODUCTS = {"qkv": (4096, 6144), "o": (4096, 4096), "gate, up": (4096, 28672), "down": (14336, 4096)}
"""Of a layer: depth and columns."""
TOKENS = 576
LAYERS = 8
"""Calls of a program, each with weights or a cache of its own, so that the L2 cache does not have them."""
WARM_UP_SECONDS, SECONDS = 0.3, 1.0


class Energy(NamedTuple):
    """Of a call."""

    microseconds: float
    millijoules: float
    watts: float
    megahertz: float


class Meter:
    """The first GPU's counters, by NVIDIA's management library. Raises ``OSError`` where there is none."""

    def __init__(self) -> None:
        self._nvml, self._device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
        self._call("nvmlInit_v2")
        self._call("nvmlDeviceGetHandleByIndex_v2", 0, ctypes.byref(self._device))

    def _call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._nvml, name)(*arguments):
            raise OSError(f"{name} failed with code {code}")

    def joules(self) -> float:
        """Since the driver was loaded; it counts in millijoules."""
        count = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._device, ctypes.byref(count))
        return count.value / 1e3

    def megahertz(self) -> float:
        """The multiprocessors' clock, now."""
        clock, of_multiprocessors = ctypes.c_uint(), 1
        self._call("nvmlDeviceGetClockInfo", self._device, of_multiprocessors, ctypes.byref(clock))
        return float(clock.value)


def measure(meter: Meter, run: Callable[[], Any], calls: int) -> Energy:
    """Of one of the ``calls`` that ``run`` makes."""

    def repeat(seconds: float) -> tuple[int, float, list[float]]:
        start, runs, clocks = time.perf_counter(), 0, []
        while time.perf_counter() - start < seconds:
            results = [run() for _ in range(4)]
            clocks.append(meter.megahertz())
            jax.block_until_ready(results)
            runs += len(results)
        return runs, time.perf_counter() - start, clocks

    repeat(WARM_UP_SECONDS)
    before = meter.joules()
    runs, seconds, clocks = repeat(SECONDS)
    joules = meter.joules() - before
    return Energy(
        seconds / (runs * calls) * 1e6, joules / (runs * calls) * 1e3, joules / seconds, float(np.median(clocks))
    )


def product(name: str, rows: int, make: Callable[..., Array]) -> Callable[[], Any]:
    """A product as the model multiplies: by our kernels where there are few rows, else by XLA's."""
    depth, columns = PRODUCTS[name]
    weights = [make((depth, columns), seed) * jnp.bfloat16(1 / 64) for seed in range(LAYERS)]
    x = make((rows, depth), 99)
    kind = "gated" if name == "gate, up" else "parts"
    width = columns // 2 if kind == "gated" else columns

    def multiply(x: Array, w: Array) -> Array:
        if not pallas_kernels.suits_linear(kind, rows, depth, width, x.dtype, backend="triton"):
            return x @ w
        if kind == "gated":
            return pallas_kernels.gated_linear(x, w.reshape(depth, 2, width), backend="triton")
        return pallas_kernels.linear_parts(x, w, backend="triton")

    layers = jax.jit(lambda x, weights: [multiply(x, w) for w in weights])
    options = UNTUNED if jax.default_backend() == "gpu" else {}
    compiled = layers.lower(x, weights).compile(options)
    return lambda: compiled(x, weights)


def attention(rows: int, backend: str, make: Callable[..., Array]) -> dict[str, Callable[[], Any]]:
    """Decode attention, and reading the same."""
    width = -(-TOKENS // 16)
    shape = (rows * width + 1, 16, kernels.KV_HEADS, kernels.DIM)
    caches = [[make(shape, 2 * layer), make(shape, 2 * layer + 1)] for layer in range(LAYERS)]
    tables = np.random.default_rng(0).permutation(np.arange(1, shape[0])).reshape(rows, width).astype(np.int32)
    sizes = {"kv_heads": kernels.KV_HEADS, "max_seq_len": 2048, "window": None}
    lens, q = jnp.full(rows, TOKENS, jnp.int32), make((rows, kernels.HEADS, kernels.DIM), 99)
    attend = jax.jit(kernels.decode_chain(jnp.asarray(tables), lens, backend, sizes, calls=LAYERS))
    read = jax.jit(lambda caches: [array.reshape(shape[0], -1).max(1) for pair in caches for array in pair])
    return {"attention": lambda: attend(q, caches), "reading its keys and values": lambda: read(caches)}


def parts(rows: int, backend: str, make: Callable[..., Array]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """One after the other: each has its own arrays."""
    yield from attention(rows, backend, make).items()
    for name in PRODUCTS:
        yield name, product(name, rows, make)


def table(meter: Meter, rows: int, backend: str, make: Callable[..., Array]) -> dict[str, Energy]:
    """Measures and prints what there is to a layer."""
    print(f"{f'{rows} sequences':>28}{'us':>9}{'mJ':>9}{'W':>6}{'MHz':>7}")
    found = {}
    for name, run in parts(rows, backend, make):
        found[name] = e = measure(meter, run, LAYERS)
        figures = f"{e.microseconds:>9.1f}{e.millijoules:>9.2f}{e.watts:>6.0f}{e.megahertz:>7.0f}"
        print(f"{name:>28}{figures}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 256], help="sequences that decode [128 256]")
    parser.add_argument("--backend", default="gluon", help="of attention [gluon]")
    parser.add_argument("--zeros", action="store_true", help="instead of random numbers, which take more energy")
    arguments = parser.parse_args()
    try:
        meter = Meter()
    except OSError as error:
        sys.exit(f"no NVIDIA GPU whose energy could be measured: {error}")
    print(machine())
    before = meter.joules()
    time.sleep(SECONDS)
    print(f"at rest {(meter.joules() - before) / SECONDS:.0f} W")
    make = (lambda shape, _: jnp.zeros(shape, jnp.bfloat16)) if arguments.zeros else kernels.random_array
    for rows in arguments.rows:
        table(meter, rows, arguments.backend, make)


if __name__ == "__main__":
    main()
