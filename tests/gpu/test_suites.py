"""The suites that every backend owes, on a GPU: run with ``JAX_PLATFORMS=cuda python -m pytest -m gpu``.

There, engines take Triton kernels and two steps in flight by default; float32 is computed at full precision.
"""

from __future__ import annotations

import jax
import pytest

from tests.engine.test_core import *  # noqa: F403
from tests.engine.test_invariance import *  # noqa: F403
from tests.engine.test_prompt_logprobs import *  # noqa: F403
from tests.models.test_reference import *  # noqa: F403

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def on_a_gpu() -> None:
    assert jax.devices()[0].platform == "gpu", "there is no GPU, or JAX_PLATFORMS forbids it"
