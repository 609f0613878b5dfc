"""Llama 2, 3, 3.x and Mistral: a function of parameters, cache and tokens.

Layers are unrolled, one array a matrix and layer; each call of the layer is an inner ``jit``, traced once. Fused
matrices keep their axes, so that tensor parallelism can shard them: qkv ``[D, K, G + 2, hd]`` by KV head (G query
heads, then key and value), gate and up ``[D, 2, I]``, LM head by vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pallas_kernels
from jaxserve.models.attention import AttentionInputs, AttentionSpec, attend, plan_decode
from jaxserve.models.config import ModelConfig
from jaxserve.models.kv_cache import KVCache
from jaxserve.models.layers import linear, rope_frequencies, rope_tables
from jaxserve.models.weights import Checkpoint
from pallas_kernels import DecodePlan
from pallas_kernels.reference import rms_norm

logger = logging.getLogger(__name__)

Array = jax.Array
Params = dict[str, Any]

# How each parameter is sharded over the mesh axis "tp"; names not listed are replicated.
SPECS = {
    "qkv": P(None, "tp"),
    "qkv_bias": P("tp"),
    "o": P("tp"),
    "gate_up": P(None, None, "tp"),
    "gate_up_bias": P(None, "tp"),
    "down": P("tp"),
    "lm_head": P(None, "tp"),
}


def param_shapes(config: ModelConfig) -> Params:
    """The shape of every parameter, in the structure of the parameters."""
    hidden, inner, vocab, dim = config.hidden_size, config.intermediate_size, config.vocab_size, config.head_dim
    kv, groups = config.num_kv_heads, config.num_heads // config.num_kv_heads
    layer: dict[str, tuple[int, ...]] = {
        "input_norm": (hidden,),
        "qkv": (hidden, kv, groups + 2, dim),
        "o": (kv, groups, dim, hidden),
        "post_norm": (hidden,),
        "gate_up": (hidden, 2, inner),
        "down": (inner, hidden),
    }
    if config.qkv_bias:
        layer["qkv_bias"] = (kv, groups + 2, dim)
    if config.o_bias:
        layer["o_bias"] = (hidden,)
    if config.mlp_bias:
        layer |= {"gate_up_bias": (2, inner), "down_bias": (hidden,)}
    ends: dict[str, tuple[int, ...]] = {"embed": (vocab, hidden), "norm": (hidden,)}
    if not config.tie_word_embeddings:
        ends["lm_head"] = (hidden, vocab)
    return {"layers": tuple(dict(layer) for _ in range(config.num_layers)), **ends}


def load_params(
    checkpoint: Checkpoint,
    config: ModelConfig,
    put: Callable[[np.ndarray, P], Array],
    progress: Callable[[int], None],
) -> Params:
    """Read every parameter; ``put`` places one on the devices, ``progress`` hears how many layers are done."""

    def placed(arrays: dict[str, np.ndarray]) -> Params:
        return {name: put(a, SPECS.get(name, P())) for name, a in arrays.items()}

    layers = []
    for index in range(config.num_layers):
        layers.append(placed(_read_layer(checkpoint, config, f"model.layers.{index}")))
        progress(index + 1)
    vocab, hidden = config.vocab_size, config.hidden_size
    ends = {
        "embed": checkpoint.get("model.embed_tokens.weight", vocab, hidden),
        "norm": checkpoint.get("model.norm.weight", hidden),
    }
    if not config.tie_word_embeddings:
        ends["lm_head"] = np.ascontiguousarray(checkpoint.get("lm_head.weight", vocab, hidden).T)
    elif "lm_head.weight" in checkpoint:
        _check_tied(checkpoint, ends["embed"])
    checkpoint.check_all_read()
    return {"layers": tuple(layers), **placed(ends)}


def _read_layer(checkpoint: Checkpoint, config: ModelConfig, prefix: str) -> dict[str, np.ndarray]:
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv, dim = config.num_heads, config.num_kv_heads, config.head_dim
    groups = heads // kv

    def read(name: str, *shape: int) -> np.ndarray:
        return checkpoint.get(f"{prefix}.{name}", *shape)

    def read_qkv(kind: str, *rest: int) -> np.ndarray:
        q = read(f"self_attn.q_proj.{kind}", heads * dim, *rest).reshape(kv, groups, dim, *rest)
        k = read(f"self_attn.k_proj.{kind}", kv * dim, *rest).reshape(kv, 1, dim, *rest)
        v = read(f"self_attn.v_proj.{kind}", kv * dim, *rest).reshape(kv, 1, dim, *rest)
        return np.concatenate([q, k, v], axis=1)

    def read_gate_up(kind: str, *rest: int) -> np.ndarray:
        return np.stack([read(f"mlp.{part}_proj.{kind}", inner, *rest) for part in ("gate", "up")])

    layer = {
        "input_norm": read("input_layernorm.weight", hidden),
        "qkv": read_qkv("weight", hidden).transpose(3, 0, 1, 2),
        "o": read("self_attn.o_proj.weight", hidden, heads * dim).T.reshape(kv, groups, dim, hidden),
        "post_norm": read("post_attention_layernorm.weight", hidden),
        "gate_up": read_gate_up("weight", hidden).transpose(2, 0, 1),
        "down": read("mlp.down_proj.weight", hidden, inner).T,
    }
    if config.qkv_bias:
        layer["qkv_bias"] = read_qkv("bias")
    if config.o_bias:
        layer["o_bias"] = read("self_attn.o_proj.bias", hidden)
    if config.mlp_bias:
        layer["gate_up_bias"] = read_gate_up("bias")
        layer["down_bias"] = read("mlp.down_proj.bias", hidden)
    return {name: np.ascontiguousarray(a) for name, a in layer.items()}


def _check_tied(checkpoint: Checkpoint, embed: np.ndarray) -> None:
    if not np.array_equal(checkpoint.get("lm_head.weight", *embed.shape), embed):
        logger.warning("lm_head.weight differs from the embedding that config.json ties it to; it is ignored")


def forward(
    params: Params,
    cache: KVCache,
    token_ids: Array,
    inputs: AttentionInputs,
    *,
    config: ModelConfig,
    spec: AttentionSpec,
) -> tuple[Array, KVCache]:
    """``token_ids[T]`` -> hidden states ``[T, D]`` before the last norm, and the cache with this step's KV."""
    x = params["embed"][token_ids]
    delta = jnp.zeros_like(x)  # what the layer before adds to x: the addition is fused with the norm that follows it
    rope = rope_tables(inputs.positions, rope_frequencies(config.rope, config.head_dim))
    plans = {window: plan_decode(spec, cache[0], inputs, window) for window in dict.fromkeys(config.windows)}
    new_cache = []
    for layer, layer_cache, window in zip(params["layers"], cache, config.windows, strict=True):
        x, delta, updated, plans[window] = _layer(
            layer, layer_cache, x, delta, rope, inputs, plans[window], config=config, spec=spec
        )
        new_cache.append(updated)
    return x + delta, tuple(new_cache)


@partial(jax.jit, static_argnames=("config", "spec"), inline=False)
def _layer(
    p: Params,
    cache: tuple[Array, Array],
    x: Array,
    delta: Array,
    rope: tuple[Array, Array],
    inputs: AttentionInputs,
    plan: DecodePlan,
    *,
    config: ModelConfig,
    spec: AttentionSpec,
) -> tuple[Array, Array, tuple[Array, Array], DecodePlan]:
    """The residual stream ``x[T, D]`` and what is still to be added to it, before and after a layer."""
    add_norm = partial(pallas_kernels.add_rms_norm, eps=config.rms_norm_eps, backend=spec.backend)
    x, normed = add_norm(x, delta, p["input_norm"])
    qkv = linear(normed, p["qkv"], p.get("qkv_bias"))
    attended, cache, plan = attend(spec, qkv, rope, cache, inputs, plan)
    delta = linear(attended, p["o"], p.get("o_bias"), contract=3)
    x, normed = add_norm(x, delta, p["post_norm"])
    gate_up = linear(normed, p["gate_up"], p.get("gate_up_bias"))
    activated = pallas_kernels.swiglu(gate_up, backend=spec.backend)
    return x, linear(activated, p["down"], p.get("down_bias")), cache, plan


def logits(params: Params, hidden: Array, *, config: ModelConfig) -> Array:
    """Float32 logits ``[R, V]`` of hidden states ``[R, D]``."""
    x = rms_norm(hidden, params["norm"], config.rms_norm_eps)
    if config.tie_word_embeddings:
        return linear(x, params["embed"], transposed=True, dtype=jnp.float32)
    return linear(x, params["lm_head"], dtype=jnp.float32)
