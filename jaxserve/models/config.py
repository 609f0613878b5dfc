"""A checkpoint's config.json, read strictly: what would change the answer and is not known is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.models.registry import ARCHITECTURES


class CheckpointError(ValueError):
    """A model directory that cannot be served; one line that names what is wrong."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding; ``kind`` is default, linear or llama3."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """What the model code needs to know; hashable, so that it can be a static argument."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    windows: tuple[int | None, ...]
    """Sliding window of each layer in tokens, the current one included; None sees everything."""
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    checkpoint_dtype: str
    eos_token_ids: frozenset[int]


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises ``CheckpointError`` naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value


def load_generation_config(directory: Path) -> dict[str, Any]:
    """generation_config.json, or an empty dict where there is none."""
    path = directory / "generation_config.json"
    return load_json(path) if path.exists() else {}


def load_model_config(directory: Path) -> ModelConfig:
    """Read config.json and the EOS ids of generation_config.json; raises ``CheckpointError``."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory; --model takes a HuggingFace model directory, or demo")
    raw = load_json(directory / "config.json")
    architecture = _architecture(raw)
    _refuse_unknown_variants(raw)
    hidden, heads = _integer(raw, "hidden_size"), _integer(raw, "num_attention_heads")
    kv_heads = _integer(raw, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {heads} attention heads do not divide by {kv_heads} KV heads")
    head_dim = _integer(raw, "head_dim", hidden // heads)
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim must be even, got {head_dim}")
    layers, bias = _integer(raw, "num_hidden_layers"), bool(raw.get("attention_bias"))
    return ModelConfig(
        architecture=architecture,
        vocab_size=_integer(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_integer(raw, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope=_rope(raw),
        max_position_embeddings=_integer(raw, "max_position_embeddings", 2048),
        windows=(_window(raw, architecture),) * layers,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias")),
        checkpoint_dtype=_dtype(raw),
        eos_token_ids=_ids(raw) | _ids(load_generation_config(directory)),
    )


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    raise CheckpointError(
        f"config.json: architecture {', '.join(map(str, names)) or '(none named)'} is not supported,"
        f" only {', '.join(ARCHITECTURES)}"
    )


def _refuse_unknown_variants(raw: dict[str, Any]) -> None:
    for key, neutral in (
        ("hidden_act", ("silu",)),
        ("quantization_config", (None,)),
        ("partial_rotary_factor", (None, 1, 1.0)),
        ("layer_types", (None,)),
        ("attn_logit_softcapping", (None,)),
        ("final_logit_softcapping", (None,)),
    ):
        value = raw.get(key, neutral[0])
        if key == "layer_types" and isinstance(value, list) and set(value) == {"full_attention"}:
            continue
        if value not in neutral:
            shown = "a value" if isinstance(value, dict | list) else repr(value)
            raise CheckpointError(f"config.json: {key} has {shown} that is not supported")


def _rope(raw: dict[str, Any]) -> RopeConfig:
    """``rope_scaling`` beside ``rope_theta``, or both in ``rope_parameters`` as newer files have it."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta", raw.get("rope_theta", 10000.0)))
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    needed = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    if kind not in needed:
        raise CheckpointError(f"config.json: RoPE type {kind!r} is not supported, only default, linear, llama3")
    for key in needed[kind]:
        if not isinstance(parameters.get(key), int | float):
            raise CheckpointError(f"config.json: RoPE type {kind!r} needs a number {key!r}")
    return RopeConfig(kind=kind, theta=theta, **{key: parameters[key] for key in needed[kind]})


def _window(raw: dict[str, Any], architecture: str) -> int | None:
    window = raw.get("sliding_window", 4096 if architecture == "MistralForCausalLM" else None)  # transformers' default
    if window is None or raw.get("use_sliding_window") is False:
        return None
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise CheckpointError(f"config.json: sliding_window must be null or a positive integer, got {window!r}")
    if architecture != "MistralForCausalLM":
        raise CheckpointError(f"config.json: sliding_window is not supported for {architecture}")
    return window


def _dtype(raw: dict[str, Any]) -> str:
    """``dtype`` (the newer key) wins over ``torch_dtype``; null counts as absent; neither means float32."""
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    return str(name).removeprefix("torch.")


def _ids(raw: dict[str, Any]) -> frozenset[int]:
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return frozenset(i for i in ids if isinstance(i, int))


def _integer(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value
