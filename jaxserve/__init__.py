"""jaxserve: serve Llama and Mistral models with JAX, behind OpenAI's API or from a notebook."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.engine.llm import LLM
    from jaxserve.request import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = version("jaxserve")


def __getattr__(name: str) -> Any:
    # Lazily, so that the API processes, which must not take the GPU's memory, never import jax.
    if name == "LLM":
        from jaxserve.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from jaxserve.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
