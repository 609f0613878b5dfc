"""Prefix cache, preemption and swap to pinned host memory, on a GPU."""

from __future__ import annotations

import jax
import pytest

from tests.engine.test_cache_equality import *  # noqa: F403
from tests.runner.test_swap import *  # noqa: F403

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def on_a_gpu() -> None:
    assert jax.devices()[0].platform == "gpu", "there is no GPU, or JAX_PLATFORMS forbids it"
