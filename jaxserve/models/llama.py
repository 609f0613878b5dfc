"""Llama 2, 3, 3.x and Mistral: a function of parameters, cache and tokens.

Layers are unrolled, one array a matrix and layer; each call of the layer is an inner ``jit``, traced once. Fused
matrices keep their axes, so that tensor parallelism can shard them: qkv ``[D, K, G + 2, hd]`` by KV head (G query
heads, then key and value), gate and up ``[D, 2, I]``, LM head by vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
from jaxserve.models.layers import float32_linear, gated_linear, linear, linear_parts, rope_frequencies, rope_tables
from jaxserve.models.weights import Checkpoint
from pallas_kernels import DecodePlan
from pallas_kernels.reference import rms_norm, sum_parts

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

LOADING_THREADS = 8
"""Layers that are read, copied to the devices and fused there at the same time."""
CHAINED_ROWS = 64
"""An H200 at its power limit takes 5.51 ms for a step of 64 sequences as a chain and 5.71 without; of 128 sequences,
7.53 and 7.34."""
_QKV = ("q_proj", "k_proj", "v_proj")


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


def load_params(checkpoint: Checkpoint, config: ModelConfig, into: Params, progress: Callable[[int], None]) -> Params:
    """Read every parameter onto the devices, several layers at a time; ``progress`` hears how many layers are done.

    They take the memory of ``into``, arrays like them that are given up: what is needed on the way lies behind all
    parameters then, and leaves no holes between them."""

    def on_devices(fuse: Callable[[Params], Params], arrays: Params) -> Callable[[Params, Params], Params]:
        places = {name: array.sharding for name, array in arrays.items()}
        return jax.jit(lambda _, raw: fuse(raw), out_shardings=places, donate_argnums=0, keep_unused=True)

    fuse_layer = on_devices(partial(_fuse_layer, config=config), into["layers"][0])

    def load_layer(index: int) -> Params:
        return fuse_layer(into["layers"][index], _read_layer(checkpoint, config, f"model.layers.{index}"))

    layers = [load_layer(0)]  # alone, so that only one thread compiles what all use
    progress(1)
    with ThreadPoolExecutor(LOADING_THREADS) as pool:
        try:
            for layer in pool.map(load_layer, range(1, config.num_layers)):
                layers.append(layer)
                progress(len(layers))
        except Exception:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    vocab, hidden = config.vocab_size, config.hidden_size
    ends = {
        "embed": checkpoint.get("model.embed_tokens.weight", vocab, hidden),
        "norm": checkpoint.get("model.norm.weight", hidden),
    }
    if not config.tie_word_embeddings:
        ends["lm_head"] = checkpoint.get("lm_head.weight", vocab, hidden)
    elif "lm_head.weight" in checkpoint:
        _check_tied(checkpoint, ends["embed"])
    checkpoint.check_all_read()
    old = {name: into[name] for name in ends}
    return {"layers": tuple(layers), **on_devices(_fuse_ends, old)(old, ends)}


def _read_layer(checkpoint: Checkpoint, config: ModelConfig, prefix: str) -> dict[str, np.ndarray]:
    """The tensors of a layer as they are stored, by what stands between prefix and kind: ``q_proj.weight``."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv = config.num_heads * dim, config.num_kv_heads * dim
    layer = {
        name: checkpoint.get(f"{prefix}.{name}.weight", hidden)
        for name in ("input_layernorm", "post_attention_layernorm")
    }
    for part, biased, projections in (
        ("self_attn", config.qkv_bias, {"q_proj": (heads, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}),
        ("self_attn", config.o_bias, {"o_proj": (hidden, heads)}),
        (
            "mlp",
            config.mlp_bias,
            {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)},
        ),
    ):
        for name, shape in projections.items():
            layer[f"{name}.weight"] = checkpoint.get(f"{prefix}.{part}.{name}.weight", *shape)
            if biased:
                layer[f"{name}.bias"] = checkpoint.get(f"{prefix}.{part}.{name}.bias", shape[0])
    return layer


def _fuse_layer(raw: Params, config: ModelConfig) -> Params:
    """The parameters of a layer from its tensors, in the layout of ``param_shapes``."""
    kv, dim = config.num_kv_heads, config.head_dim
    groups = config.num_heads // kv

    def qkv(kind: str) -> Array:
        parts = [raw[f"{name}.{kind}"].reshape(kv, -1, dim, *raw[f"{name}.{kind}"].shape[1:]) for name in _QKV]
        return jnp.concatenate(parts, axis=1)

    def gate_up(kind: str) -> Array:
        return jnp.stack([raw[f"gate_proj.{kind}"], raw[f"up_proj.{kind}"]])

    layer = {
        "input_norm": raw["input_layernorm"],
        "qkv": qkv("weight").transpose(3, 0, 1, 2),
        "o": raw["o_proj.weight"].T.reshape(kv, groups, dim, config.hidden_size),
        "post_norm": raw["post_attention_layernorm"],
        "gate_up": gate_up("weight").transpose(2, 0, 1),
        "down": raw["down_proj.weight"].T,
    }
    if config.qkv_bias:
        layer["qkv_bias"] = qkv("bias")
    if config.o_bias:
        layer["o_bias"] = raw["o_proj.bias"]
    if config.mlp_bias:
        layer |= {"gate_up_bias": gate_up("bias"), "down_bias": raw["down_proj.bias"]}
    return layer


def _fuse_ends(raw: Params) -> Params:
    return {name: array.T if name == "lm_head" else array for name, array in raw.items()}


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
) -> tuple[Array, Array | None, KVCache]:
    """``token_ids[T]`` -> hidden states ``[S, D]`` of each row's last token before the last norm; where there are
    prompts, what all tokens bring to the last layer, ``[T, D]``, for ``finish``; and the cache with this step's KV.

    Of most prompt tokens the last layer has to give nothing but keys and values; the rest of it is computed for the
    last token of each row alone.
    """
    x = params["embed"][token_ids]
    delta = jnp.zeros_like(x)[None]  # what the layer before adds to x, in parts: the norm that follows adds it up
    rope = _rope(inputs, config)
    has_prompts = inputs.prefill_seq_lens.shape[0] > 0
    many = config.num_layers - has_prompts  # layers that are computed for all tokens
    plan = partial(plan_decode, spec, cache[0], table_width=inputs.block_tables.shape[1])
    plans = {window: plan(inputs.decode_seq_lens, window=window) for window in dict.fromkeys(config.windows[:many])}
    layers = partial(_layers, config=config, spec=spec)
    run = pallas_kernels.chained(layers) if spec.chained else layers
    x, delta, done = run(params["layers"][:many], cache[:many], x, delta, rope, inputs, tuple(plans.values()))
    last_input = None
    if has_prompts:
        last_input = x + sum_parts(delta, x.dtype)
        last_plan = plan(inputs.seq_lens, window=config.windows[-1])
        x, delta, last_cache, _ = _layer(
            params["layers"][-1], cache[-1], x, delta, rope, inputs, last_plan, config=config, spec=spec, last_only=True
        )
        done = (*done, last_cache)
    return x + sum_parts(delta, x.dtype), last_input, done


def finish(
    params: Params, cache: KVCache, x: Array, inputs: AttentionInputs, *, config: ModelConfig, spec: AttentionSpec
) -> tuple[Array, KVCache]:
    """The last layer for all tokens of a step with prompts: from what they bring to it, ``x[T, D]``, their hidden
    states ``[T, D]`` before the last norm, and the cache, in which their keys and values are written once more."""
    table_width, window = inputs.block_tables.shape[1], config.windows[-1]
    plan = plan_decode(spec, cache[-1], inputs.decode_seq_lens, table_width, window)
    delta, rope = jnp.zeros_like(x)[None], _rope(inputs, config)
    x, delta, last, _ = _layer(params["layers"][-1], cache[-1], x, delta, rope, inputs, plan, config=config, spec=spec)
    return x + sum_parts(delta, x.dtype), (*cache[:-1], last)


def _rope(inputs: AttentionInputs, config: ModelConfig) -> tuple[Array, Array]:
    return rope_tables(inputs.positions, rope_frequencies(config.rope, config.head_dim))


def _layers(
    layers: tuple[Params, ...],
    cache: KVCache,
    x: Array,
    delta: Array,
    rope: tuple[Array, Array],
    inputs: AttentionInputs,
    plans: tuple[DecodePlan, ...],
    *,
    config: ModelConfig,
    spec: AttentionSpec,
) -> tuple[Array, Array, KVCache]:
    """The model's first layers, or all; ``plans`` has one for each of their windows."""
    windows = config.windows[: len(layers)]
    by_window = dict(zip(dict.fromkeys(windows), plans, strict=True))
    new_cache = []
    for layer, layer_cache, window in zip(layers, cache, windows, strict=True):
        x, delta, updated, by_window[window] = _layer(
            layer, layer_cache, x, delta, rope, inputs, by_window[window], config=config, spec=spec
        )
        new_cache.append(updated)
    return x, delta, tuple(new_cache)


@partial(jax.jit, static_argnames=("config", "spec", "last_only"), inline=False)
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
    last_only: bool = False,
) -> tuple[Array, Array, tuple[Array, Array], DecodePlan]:
    """The residual stream ``x[T, D]`` and what is still to be added to it, partial sums ``[P, T, D]``, before and after
    a layer; with ``last_only``, after it of each row's last token alone."""
    add_norm = partial(pallas_kernels.add_rms_norm, eps=config.rms_norm_eps, backend=spec.backend)
    product = partial(linear_parts, backend=spec.linear_backend)
    x, normed = add_norm(x, delta, p["input_norm"])
    qkv = product(normed, p["qkv"], p.get("qkv_bias"))
    attended, cache, plan = attend(spec, qkv, rope, cache, inputs, plan, last_only=last_only)
    if last_only:
        x = x[inputs.last]
    delta = product(attended, p["o"], p.get("o_bias"), contract=3)
    x, normed = add_norm(x, delta, p["post_norm"])
    activated = gated_linear(
        normed, p["gate_up"], p.get("gate_up_bias"), backend=spec.linear_backend, swiglu_backend=spec.backend
    )
    return x, product(activated, p["down"], p.get("down_bias")), cache, plan


def can_be_chained(config: ModelConfig, rows: int, dtype: jnp.dtype, spec: AttentionSpec) -> bool:
    """Whether the layers of a step in which ``rows`` sequences decode are nothing but Triton kernels on one device, and
    few enough rows for a chain to pay."""
    biased = config.qkv_bias or config.o_bias or config.mlp_bias
    if biased or spec.mesh.size > 1 or spec.decode_backend != "gluon" or rows > CHAINED_ROWS:
        return False
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    qkv = heads + 2 * config.num_kv_heads * config.head_dim
    products = [("parts", hidden, qkv), ("parts", heads, hidden), ("gated", hidden, inner), ("parts", inner, hidden)]
    suits = partial(pallas_kernels.suits_linear, dtype=dtype, backend=spec.linear_backend)
    return all(suits(kind, rows, depth, columns) for kind, depth, columns in products)


def final_norm(params: Params, hidden: Array, *, config: ModelConfig) -> Array:
    """Hidden states ``[T, D]`` as the LM head takes them."""
    return rms_norm(hidden, params["norm"], config.rms_norm_eps)


def logits(params: Params, hidden: Array, *, config: ModelConfig, spec: AttentionSpec) -> Array:
    """Float32 logits ``[R, V]`` of hidden states ``[R, D]``."""
    x = final_norm(params, hidden, config=config)
    if config.tie_word_embeddings:
        return linear(x, params["embed"], transposed=True, dtype=jnp.float32)
    return float32_linear(x, params["lm_head"], backend=spec.linear_backend)
