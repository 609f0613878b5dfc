"""Mosaic GPU's kernel as programs for a GPU take it, seen without one."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import mosaic_prefill

SHAPES = [
    jax.ShapeDtypeStruct(shape, dtype)
    for shape, dtype in (
        ((64, 4, 64), jnp.bfloat16),
        *[((9, 16, 2, 64), jnp.bfloat16)] * 2,
        ((2, 8), jnp.int32),
        ((2,), jnp.int32),
        ((3,), jnp.int32),
    )
]
OPTIONS = {"scale": 0.125, "window": None}


def lowered(function) -> str:
    return jax.jit(function).trace(*SHAPES).lower(lowering_platforms=("cuda",)).as_text()


def kernel(text: str) -> str:
    """Its code, but for the number that Mosaic gives each kernel of a process."""
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2(") == 1
    [module] = re.findall(r'module = "((?:[^"\\]|\\.)*)"', text)
    return re.sub(r"prefill_attention_\d+", "prefill_attention", module)


def test_the_kernel_kept_is_the_kernel(cache, monkeypatch):
    directly = lowered(partial(mosaic_prefill._attend, **OPTIONS, tuning=mosaic_prefill.TUNING))
    made = lowered(partial(mosaic_prefill.prefill_attention, **OPTIONS))
    assert kernel(made) == kernel(directly)
    assert [path.name.partition("-")[0] for path in (cache / "kernels").iterdir()] == ["mosaic_prefill"]
    mosaic_prefill._exported.cache_clear()
    monkeypatch.setattr(mosaic_prefill, "_attend", lambda *operands, **options: pytest.fail("made again"))
    assert lowered(partial(mosaic_prefill.prefill_attention, **OPTIONS)) == made


def test_other_shapes_are_another_kernel(cache):
    for window in (None, 16):
        lowered(partial(mosaic_prefill.prefill_attention, scale=0.125, window=window))
    assert len(list((cache / "kernels").iterdir())) == 2
