"""Tiny checkpoints in HuggingFace layout, made on the spot: nothing is downloaded.

    python -m tests.checkpoints NAME DIRECTORY

``make_checkpoint`` writes one of ``NAMES``: random weights, the same bits on every run, so that the
references in tests/data hold.  ``make_table_checkpoint`` writes a model whose next token is looked up in a
table.  The other functions read a checkpoint, or spoil it for tests of loading.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

Config = dict[str, Any]
Tensors = dict[str, np.ndarray]

REMOVE: Final = object()  # for edit_config: takes the key away

# ---------------------------------------------------------------------------- tokenizers

# What the vocabularies are learned from: one changed character changes tokens, and with them every reference.
TEXT = """\
The quick brown fox jumps over the lazy dog. What is the capital of France? The capital of France is Paris.
Once upon a time, there was a little girl who lived in a house by the sea. Every day she walked along the shore
and watched the waves, the birds and the ships. Explain in one sentence why the sky is blue. The sky is blue
because the air scatters short waves of light more than long ones. Write a short poem about the sea and the sky.
You are a helpful assistant. Please answer the question in a few words. I'm sure that you're right, and we'll see
what they've done; he'd rather not say. Numbers such as 1, 2, 3, 10, 42, 100 and 2024 are common.
def fibonacci(n):
    if n <= 1:
        return n
    return fibonacci(n - 1) + fibonacci(n - 2)

for i in range(10):
    print(i, fibonacci(i))
# a comment: for each value in the list, compute the sum and return the result
class Node:
    def __init__(self, value, next=None):
        self.value = value
        self.next = next
Les élèves sont déjà partis à l'école. Größe und Höhe sind wichtig. El niño comió una manzana en el jardín.
{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}"""

LLAMA_3_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] "
    "+ '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
INST_TEMPLATE = (  # roles must alternate
    "{% if messages[0]['role'] == 'system' %}"
    "{% set system = messages[0]['content'] %}{% set rest = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{{ bos_token }}{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{% if loop.first and system %}"
    "{{ '[INST] <<SYS>>\n' + system + '\n<</SYS>>\n\n' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}"
    "{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Kind:
    """A kind of tokenizer."""

    vocab_size: int
    specials: tuple[str, ...]
    named: dict[str, str]  # bos_token and so on
    template: str


LLAMA_3_SPECIALS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>",
)  # fmt: skip
LLAMA_3_NAMED = {
    "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|finetune_right_pad_id|>",
}  # fmt: skip
MISTRAL_NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
KINDS = {
    "byte-level": Kind(520, LLAMA_3_SPECIALS, LLAMA_3_NAMED, LLAMA_3_TEMPLATE),
    "tekken": Kind(520, ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"), MISTRAL_NAMED, INST_TEMPLATE),
    "sentencepiece": Kind(600, ("<unk>", "<s>", "</s>"), MISTRAL_NAMED, INST_TEMPLATE),
}


def byte_level_model(kind: Kind) -> Tokenizer:
    """Every byte is a symbol (ids 0 to 255), then come the merges, then the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    split = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    words = pre_tokenizers.Split(Regex(split), behavior="isolated")
    symbols = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, symbols])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    size = kind.vocab_size - len(kind.specials)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    return tokenizer


def sentencepiece_model(kind: Kind) -> Tokenizer:
    """The special tokens come first, then <0xNN> bytes, then pieces in which '▁' stands for a space."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    head = [*kind.specials, *(f"<0x{byte:02X}>" for byte in range(256))]
    learned = Tokenizer(models.BPE())
    learned.normalizer = normalizer
    learned.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")  # no merge across words
    trainer = trainers.BpeTrainer(vocab_size=kind.vocab_size - len(head), show_progress=False)
    learned.train_from_iterator(TEXT.splitlines(), trainer)
    bpe = json.loads(learned.to_str())["model"]
    vocab = {token: i for i, token in enumerate([*head, *sorted(bpe["vocab"], key=bpe["vocab"].get)])}
    merges = [(left, right) for left, right in bpe["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def build_tokenizer(kind: str) -> Tokenizer:
    """The tokenizer of a kind, which puts bos_token before a text."""
    spec = KINDS[kind]
    tokenizer = sentencepiece_model(spec) if kind == "sentencepiece" else byte_level_model(spec)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in spec.specials])
    bos = spec.named["bos_token"]
    bos_id = [(bos, tokenizer.token_to_id(bos))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=bos_id
    )
    assert tokenizer.get_vocab_size() == spec.vocab_size, "the text gives too few merges"
    return tokenizer


def byte_tokens(data: bytes, kind: str = "byte-level") -> list[int]:
    """The ids of the tokens that stand for these bytes, one each."""
    if kind == "sentencepiece":
        return [len(KINDS[kind].specials) + byte for byte in data]
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # those that are their own symbol
    order = [*shown, *(byte for byte in range(256) if byte not in shown)]
    return [order.index(byte) for byte in data]


# ---------------------------------------------------------------------------- variants


def model_config(family: str, **changes: Any) -> Config:
    """A config.json of four layers, but for the ids of special tokens; REMOVE leaves a key out."""
    config: Config = {
        "architectures": [f"{family.capitalize()}ForCausalLM"], "model_type": family, "vocab_size": 520,
        "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 256, "max_position_embeddings": 512, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "initializer_range": 0.02, "attention_dropout": 0.0, "use_cache": True,
    }  # fmt: skip
    if family == "llama":
        config["pretraining_tp"] = 1
    return {key: value for key, value in (config | changes).items() if value is not REMOVE}


def llama_3_rope(factor: float, original: int) -> Config:
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": original}
    return {"rope_type": "llama3", "factor": factor, **bands}


@dataclass(frozen=True)
class Variant:
    """A checkpoint but for its tensors."""

    kind: str
    config: Config
    seed: int = 0
    more_eos: tuple[str, ...] = ()  # stop tokens beside eos_token
    generation: Config = field(default_factory=dict)
    shards: int = 1
    template_file: bool = False  # the chat template has a file of its own


LLAMA_3_STOPS = ("<|end_of_text|>", "<|eom_id|>")
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
# fmt: off
VARIANTS = {
    # MHA, fp16, an old config that has neither num_key_value_heads nor rope_theta
    "tiny-llama-2": Variant("sentencepiece", model_config(
        "llama", vocab_size=600, num_key_value_heads=REMOVE, intermediate_size=344, torch_dtype="float16",
        max_position_embeddings=256, rope_theta=REMOVE, rope_scaling=None,
    ), seed=102, generation=SAMPLING),
    # GQA 8/2, a rope scaling that acts within 64 positions, three eos ids
    "tiny-llama-3.1": Variant("byte-level", model_config(
        "llama", num_attention_heads=8, rope_theta=500000.0, rope_scaling=llama_3_rope(8.0, 64),
        attention_bias=False, mlp_bias=False,
    ), seed=501, more_eos=LLAMA_3_STOPS, generation=SAMPLING),
    # tied embeddings, head_dim given, the newer spelling of a config (rope_parameters, dtype)
    "tiny-llama-3.2": Variant("byte-level", model_config(
        "llama", head_dim=32, max_position_embeddings=1024, torch_dtype=REMOVE, dtype="bfloat16",
        rope_theta=REMOVE, rope_parameters={"rope_theta": 500000.0, **llama_3_rope(32.0, 32)},
        tie_word_embeddings=True, attention_bias=False, mlp_bias=False,
    ), seed=105, more_eos=LLAMA_3_STOPS, template_file=True),
    # biases everywhere, one KV head, linear rope scaling, fp32
    "tiny-llama-bias": Variant("byte-level", model_config(
        "llama", hidden_size=64, num_hidden_layers=3, num_key_value_heads=1, intermediate_size=128,
        max_position_embeddings=256, rms_norm_eps=1e-6, rope_scaling={"type": "linear", "factor": 2.0},
        torch_dtype="float32", attention_bias=True, mlp_bias=True,
    ), seed=706),
    # head_dim 48 where hidden / heads is 32, no sliding window
    "tiny-mistral-nemo": Variant("tekken", model_config(
        "mistral", head_dim=48, rope_theta=1000000.0, sliding_window=None,
    ), seed=504),
    # a sliding window of 16 on every layer, three shards
    "tiny-mistral-swa": Variant("sentencepiece", model_config(
        "mistral", vocab_size=600, sliding_window=16,
    ), seed=703, shards=3),
}
# fmt: on
NAMES: tuple[str, ...] = tuple(VARIANTS)

# ---------------------------------------------------------------------------- weights


def layout(config: Config) -> Iterator[tuple[str, tuple[int, ...], float, float]]:
    """Name, shape, mean and spread of each tensor, in the order in which random weights are drawn."""
    hidden, inter, vocab = (config[f"{key}_size"] for key in ("hidden", "intermediate", "vocab"))
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    q, kv = heads * head_dim, config.get("num_key_value_heads", heads) * head_dim
    attention = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    mlp = {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
    # Large embeddings under a tied head would make each token predict itself: the last norm is large instead.
    tied = config["tie_word_embeddings"]
    yield "model.embed_tokens.weight", (vocab, hidden), 0.0, (1.0 if tied else 4.0) / sqrt(hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for block, shapes, gain, biased, bias_spread in (
            ("self_attn", attention, 1.5, config.get("attention_bias"), 0.2),
            ("mlp", mlp, 1.0, config.get("mlp_bias"), 0.1),
        ):
            for name, (rows, cols) in shapes.items():
                yield f"{layer}.{block}.{name}_proj.weight", (rows, cols), 0.0, gain / sqrt(cols)
                if biased:
                    yield f"{layer}.{block}.{name}_proj.bias", (rows,), 0.0, bias_spread
        yield f"{layer}.input_layernorm.weight", (hidden,), 1.0, 0.2
        yield f"{layer}.post_attention_layernorm.weight", (hidden,), 1.0, 0.2
    yield "model.norm.weight", (hidden,), 4.0 if tied else 1.0, 0.2
    if not tied:
        yield "lm_head.weight", (vocab, hidden), 0.0, 4.0 / sqrt(hidden)


def random_weights(config: Config, seed: int) -> Tensors:
    """Weights with enough spread that attention, norms and positions all change the output."""
    rng = np.random.Generator(np.random.PCG64(seed))
    stored = config.get("dtype") or config["torch_dtype"]
    dtype = np.dtype(ml_dtypes.bfloat16 if stored == "bfloat16" else stored)
    tensors: Tensors = {}
    for name, shape, mean, spread in layout(config):
        normal = rng.standard_normal(shape, dtype=np.float32)
        tensors[name] = (np.float32(mean) + normal * np.float32(spread)).astype(dtype)
    return tensors


def read_tensors(directory: Path) -> Tensors:
    """All tensors of a checkpoint, of every shard."""
    tensors: Tensors = {}
    for path in sorted(directory.glob("model*.safetensors")):
        tensors |= load_file(path)
    return tensors


def write_tensors(directory: Path, tensors: Mapping[str, np.ndarray], shards: int = 1) -> None:
    """Put these in the place of all weights there are; with several shards, write the index too."""
    for old in directory.glob("model*.safetensors*"):
        old.unlink()
    if shards == 1:
        save_file(dict(tensors), directory / "model.safetensors", {"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for n in range(shards):
        part = names[n * len(names) // shards : (n + 1) * len(names) // shards]
        file_name = f"model-{n + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: tensors[name] for name in part}, directory / file_name, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(directory / "model.safetensors.index.json", index)


def weights_sha256(tensors: Mapping[str, np.ndarray]) -> str:
    """One hash of all names and raw bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].tobytes())
    return digest.hexdigest()


# ---------------------------------------------------------------------------- files


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def edit_config(directory: Path, **changes: Any) -> None:
    """Set keys of config.json: None writes null, REMOVE takes the key away."""
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | changes
    write_json(path, {key: value for key, value in config.items() if value is not REMOVE})


def write_checkpoint(directory: Path, variant: Variant, tensors: Tensors) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    kind, tokenizer = KINDS[variant.kind], build_tokenizer(variant.kind)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(directory / "special_tokens_map.json", kind.named)

    ids: Config = {f"{role}_id": tokenizer.token_to_id(token) for role, token in kind.named.items()}
    if variant.more_eos:
        ids["eos_token_id"] = [*map(tokenizer.token_to_id, variant.more_eos), ids["eos_token_id"]]
    ids.pop("unk_token_id", None)
    write_json(directory / "generation_config.json", ids | variant.generation)
    ids.pop("pad_token_id", None)
    write_json(directory / "config.json", variant.config | ids)

    flags = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    added = sorted(tokenizer.get_added_tokens_decoder().items())
    tokenizer_config = kind.named | {
        "added_tokens_decoder": {str(i): {flag: getattr(t, flag) for flag in flags} for i, t in added},
        "clean_up_tokenization_spaces": False,
        "model_max_length": variant.config["max_position_embeddings"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if variant.template_file:
        (directory / "chat_template.jinja").write_text(kind.template, encoding="utf-8")
    else:
        tokenizer_config["chat_template"] = kind.template
    write_json(directory / "tokenizer_config.json", tokenizer_config)
    write_tensors(directory, tensors, variant.shards)
    return directory


def make_checkpoint(name: str, directory: Path) -> Path:
    """Write the checkpoint of that name into the directory itself, and return it."""
    variant = VARIANTS[name]
    return write_checkpoint(directory, variant, random_weights(variant.config, variant.seed))


def make_table_checkpoint(
    directory: Path,
    table: Mapping[int, int | Mapping[int, float]],
    *,
    kind: str = "byte-level",
    max_position_embeddings: int = 4096,
) -> Path:
    """A one-layer Llama, fp32, whose logits depend on the last token alone, by a table.

    table[t] is the token after t: its logit is 30, all others are 0.  Or it gives the logits themselves, by
    token, of those that are not 0; finite ones, as 0 * inf would be NaN after every other token too.
    After a token that the table lacks comes eos_token.
    """
    vocab = KINDS[kind].vocab_size
    assert all(0 <= token < vocab for token in table)
    config = model_config(
        "llama", vocab_size=vocab, hidden_size=-(-vocab // 8) * 8, num_hidden_layers=1, head_dim=16,
        intermediate_size=8, max_position_embeddings=max_position_embeddings, torch_dtype="float32",
    )  # fmt: skip
    eos = build_tokenizer(kind).token_to_id(KINDS[kind].named["eos_token"])
    # Norms are ones. The rest is zeros, so that the layer adds nothing to the one-hot embedding of the token.
    tensors = {name: np.full(shape, mean, np.float32) for name, shape, mean, _ in layout(config)}
    np.fill_diagonal(tensors["model.embed_tokens.weight"], 1.0)
    normed = 1.0 / sqrt(1.0 / config["hidden_size"] + config["rms_norm_eps"])  # the 1 after the last norm
    for token in range(vocab):
        row = table.get(token, eos)
        for following, logit in (row if isinstance(row, Mapping) else {row: 30.0}).items():
            tensors["lm_head.weight"][following, token] = logit / normed
    more_eos = LLAMA_3_STOPS if kind == "byte-level" else ()
    return write_checkpoint(directory, Variant(kind, config, more_eos=more_eos), tensors)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a tiny checkpoint.")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    print(make_checkpoint(arguments.name, arguments.directory))
