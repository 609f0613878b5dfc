"""The model that figures are quoted for."""

from __future__ import annotations

from typing import Any

from jaxserve.models.config import ModelConfig, RopeConfig

LLAMA_8B_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 128001,
    "bos_token_id": 128000,
}
"""config.json of the shape of Llama-3.1-8B."""


def LLAMA_8B(layers: int = 32) -> ModelConfig:
    """The same, as the model code sees it."""
    config = LLAMA_8B_CONFIG
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope=RopeConfig("llama3", 500000.0, 8.0, 1.0, 4.0, 8192),
        max_position_embeddings=131072,
        windows=(None,) * layers,
        tie_word_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        checkpoint_dtype="bfloat16",
        eos_token_ids=frozenset({128001}),
    )
