"""Which module serves which architecture; a new family is a module like ``llama`` and a line here."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
}


def model_module(architecture: str) -> ModuleType:
    """The module with ``load_params``, ``param_shapes``, ``SPECS``, ``forward``, ``finish``, ``final_norm``, ``logits``
    and ``can_be_chained`` of an architecture."""
    return import_module(f"jaxserve.models.{ARCHITECTURES[architecture]}")
