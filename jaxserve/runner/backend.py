"""Process-wide jax settings, made before jax first touches a device."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path

from jaxserve.config import EngineConfig, cache_root

logger = logging.getLogger(__name__)


def configure(config: EngineConfig) -> None:
    """Share of GPU memory, and the persistent compilation cache. Call before jax first touches a device."""
    os.environ["XLA_CLIENT_MEM_FRACTION"] = str(config.gpu_memory_utilization)
    import jax

    cache = Path(config.compilation_cache_dir or cache_root() / "xla")
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--compilation-cache-dir: cannot make {cache}: {error.strerror}") from None
    jax.config.update("jax_compilation_cache_dir", str(cache))
    writable = os.access(cache, os.W_OK)
    if not writable:
        logger.warning("%s cannot be written: what is not in it yet is compiled at every start", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0 if writable else math.inf)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
