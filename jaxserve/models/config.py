"""A checkpoint's config.json, read strictly: what would change the answer and is not known is refused."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.config import not_a_model
from jaxserve.models.registry import ARCHITECTURES

logger = logging.getLogger(__name__)

MAX_EOS_IDS = 32


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
    original_max_position_embeddings: float = 8192


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

    @property
    def widest_window(self) -> int | None:
        """Tokens that the layer with the widest view sees; None if a layer sees all."""
        return None if None in self.windows else max(window for window in self.windows if window)


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
    """Read config.json, and the EOS ids there, in generation_config.json and in tokenizer_config.json. Raises
    ``CheckpointError``."""
    if not directory.is_dir():
        raise CheckpointError(not_a_model(str(directory)))
    raw = load_json(directory / "config.json")
    architecture = _architecture(raw)
    _refuse_unknown_variants(raw)
    raw = {**_DEFAULTS[architecture], **{k: v for k, v in raw.items() if v is not None or k in _NULL_MEANS}}
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
        rms_norm_eps=_positive(raw, "rms_norm_eps"),
        rope=_rope(raw),
        max_position_embeddings=_integer(raw, "max_position_embeddings"),
        windows=(_window(raw, architecture),) * layers,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(raw.get("mlp_bias")),
        checkpoint_dtype=_dtype(raw),
        eos_token_ids=_eos_ids(raw, directory),
    )


_NULL_MEANS = {"sliding_window", "num_key_value_heads"}
"""Keys whose null is not the same as being absent: no window, and as many KV heads as heads."""

# What transformers takes for a key that is absent (num_key_value_heads: absent is num_attention_heads for Llama).
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "rope_theta": 10000.0},
    "MistralForCausalLM": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "rope_theta": 10000.0,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
}


def resolve_max_model_len(wanted: int | str | None, model: ModelConfig) -> int:
    """``--max-model-len`` for this model, its own length for None and "auto"; ``ValueError`` for more than it can.

    Linear RoPE scaling may be used up to ``factor`` times the stated length; nothing else may go beyond it.
    """
    native = model.max_position_embeddings
    if not isinstance(wanted, int):
        return native
    limit = int(native * model.rope.factor) if model.rope.kind == "linear" else native
    if wanted > limit:
        raise ValueError(f"--max-model-len {wanted} is more than the model's {limit} positions")
    return wanted


def _architecture(raw: dict[str, Any]) -> str:
    names = raw.get("architectures")
    names = names if isinstance(names, list) else [names]
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    raise CheckpointError(
        f"config.json: architecture {', '.join(map(str, names))} is not supported, only {', '.join(ARCHITECTURES)}"
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
        if key == "layer_types" and isinstance(value, list) and all(kind == "full_attention" for kind in value):
            continue
        if value not in neutral:
            shown = "a value" if isinstance(value, dict | list) else repr(value)
            raise CheckpointError(f"config.json: {key} has {shown} that is not supported")


_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_ROPE_KNOWN = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def _rope(raw: dict[str, Any]) -> RopeConfig:
    """``rope_scaling`` beside ``rope_theta``, or both in ``rope_parameters`` as newer files have it."""
    given = [key for key in ("rope_parameters", "rope_scaling") if raw.get(key) is not None]
    if len(given) == 2 and raw["rope_parameters"] != raw["rope_scaling"]:
        raise CheckpointError("config.json: rope_parameters and rope_scaling differ; only one of them may be given")
    parameters = raw[given[0]] if given else {}
    if not isinstance(parameters, dict):
        raise CheckpointError(f"config.json: {given[0]} must be an object, got {parameters!r}")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _ROPE_KEYS:
        raise CheckpointError(f"config.json: RoPE type {kind!r} is not supported, only {', '.join(_ROPE_KEYS)}")
    unknown = parameters.keys() - _ROPE_KNOWN - set(_ROPE_KEYS["llama3"])
    if unknown or parameters.get("partial_rotary_factor", 1) != 1:
        culprit = min(unknown, default="partial_rotary_factor")
        raise CheckpointError(f"config.json: {given[0]}.{culprit} is not supported")
    theta = _positive(parameters if "rope_theta" in parameters else raw, "rope_theta")
    return RopeConfig(kind=kind, theta=theta, **{key: _positive(parameters, key) for key in _ROPE_KEYS[kind]})


def _window(raw: dict[str, Any], architecture: str) -> int | None:
    window = raw.get("sliding_window")
    if window is None or raw.get("use_sliding_window") is False:
        return None
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise CheckpointError(f"config.json: sliding_window must be null or a positive integer, got {window!r}")
    if architecture != "MistralForCausalLM":
        raise CheckpointError(f"config.json: sliding_window is not supported for {architecture}")
    return window


def _dtype(raw: dict[str, Any]) -> str:
    """``dtype`` (the newer key) wins over ``torch_dtype``; null counts as absent; neither means float32."""
    name = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    return str(name).removeprefix("torch.")


def _eos_ids(raw: dict[str, Any], directory: Path) -> frozenset[int]:
    """Those that the model can generate: a fine-tune's tokenizer may name one that its embedding has no row for."""
    stated = _ids(raw) | _ids(load_generation_config(directory)) | _tokenizer_eos(directory)
    ids = frozenset(i for i in stated if i < raw["vocab_size"])
    if ids != stated:
        logger.warning("the model has no tokens %s, which are said to end answers", sorted(stated - ids))
    if len(ids) > MAX_EOS_IDS:
        raise CheckpointError(f"at most {MAX_EOS_IDS} tokens may end an answer, the checkpoint says {len(ids)}")
    return ids


def _ids(raw: dict[str, Any]) -> frozenset[int]:
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    if not all(i is None or (isinstance(i, int) and i >= 0) for i in ids):
        raise CheckpointError(f"eos_token_id must be a token id or a list of them, got {value!r}")
    return frozenset(i for i in ids if i is not None)


def _tokenizer_eos(directory: Path) -> frozenset[int]:
    """The tokenizer's own eos_token: fine-tunes often name their end of turn there and nowhere else."""
    path = directory / "tokenizer_config.json"
    if not path.exists():
        return frozenset()
    config = load_json(path)
    token = config.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    added = config.get("added_tokens_decoder")
    if not isinstance(text, str) or not isinstance(added, dict):
        return frozenset()
    return frozenset(int(i) for i, t in added.items() if isinstance(t, dict) and t.get("content") == text)


def _integer(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def _positive(raw: dict[str, Any], key: str) -> float:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise CheckpointError(f"config.json: {key} must be a positive number, got {value!r}")
    return value
