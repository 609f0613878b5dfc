from __future__ import annotations

import jax
import pytest


@pytest.fixture
def cache(tmp_path):
    """A fresh folder for compiled programs, and no kernel remembered."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    forget_kernels()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    forget_kernels()


def forget_kernels() -> None:
    pytest.importorskip("triton", reason="Triton is for Linux only")
    from pallas_kernels import mosaic_prefill, triton_call

    mosaic_prefill._exported.cache_clear()
    triton_call._triton_ir.cache_clear()
