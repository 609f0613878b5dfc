"""The demo model's conversion, on tiny GGUF files made here; one test at the end has the real model."""

import json
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from gguf.quants import dequantize, quantize
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors.numpy import load_file
from tokenizers import Tokenizer, pre_tokenizers

from jaxserve import demo
from jaxserve.demo import DemoError, cache_root, convert_gguf, demo_model_directory, unpermute_rope_rows
from jaxserve.engine.defaults import sampling_defaults

Array = npt.NDArray[Any]

LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER = 2, 4, 2, 8, 64
HIDDEN = HEADS * HEAD_DIM
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
TOKENS = SPECIALS + sorted(pre_tokenizers.ByteLevel.alphabet()) + [merge.replace(" ", "") for merge in MERGES]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

META: dict[str, Any] = {
    "llama.block_count": LAYERS,
    "llama.context_length": 128,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": INNER,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.rope.dimension_count": HEAD_DIM,
    "llama.rope.freq_base": 100000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": len(TOKENS),
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)),
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.add_space_prefix": False,
    "tokenizer.chat_template": TEMPLATE,
}


def permute_rope_rows(weight: Array, heads: int) -> Array:
    """What llama.cpp's converter does to query and key weights."""
    rows, inputs = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, inputs).swapaxes(1, 2).reshape(weight.shape)


def tiny_tensors() -> dict[str, Array]:
    """Random llama weights under GGUF's names, query and key rows still in HuggingFace's order."""
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm": (HIDDEN,),
            f"blk.{i}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{i}.attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{i}.ffn_norm": (HIDDEN,),
            f"blk.{i}.ffn_gate": (INNER, HIDDEN),
            f"blk.{i}.ffn_up": (INNER, HIDDEN),
            f"blk.{i}.ffn_down": (HIDDEN, INNER),
        }
    rng = np.random.default_rng(0)
    return {f"{name}.weight": rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    meta: dict[str, Any] | None = None,
    tensors: dict[str, Array] | None = None,
    architecture: str = "llama",
) -> Path:
    """The tiny model, changed by ``meta`` (None leaves a key out) and by more or other ``tensors``.

    The embedding and the feed-forward weights are quantised, as they are in the real file.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (META | (meta or {})).items():
        match value:
            case None:
                pass
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    for name, array in (tiny_tensors() | (tensors or {})).items():
        if ".attn_q." in name or ".attn_k." in name:
            array = permute_rope_rows(array, HEADS if ".attn_q." in name else KV_HEADS)
        kind = quantisation(name)
        writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantisation(name: str) -> gguf.GGMLQuantizationType:
    if name == "token_embd.weight":
        return gguf.GGMLQuantizationType.Q8_0
    if ".ffn_" in name and "norm" not in name:
        return gguf.GGMLQuantizationType.Q4_1
    return gguf.GGMLQuantizationType.F32


def silent(line: str) -> None:
    """No progress lines."""


def test_rope_rows_of_one_head() -> None:
    stored = np.array([[0], [4], [1], [5], [2], [6], [3], [7]])  # pair i at 2i and 2i + 1
    assert unpermute_rope_rows(stored, 1).ravel().tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("heads", [1, 3, 9])
def test_rope_rows_round_trip(heads: int) -> None:
    weight = np.random.default_rng(heads).standard_normal((heads * 16, 5))
    np.testing.assert_array_equal(unpermute_rope_rows(permute_rope_rows(weight, heads), heads), weight)


def test_conversion_of_weights(tmp_path: Path) -> None:
    convert_gguf(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "model", silent)
    found = load_file(tmp_path / "model" / "model.safetensors")
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
    }
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for i in range(LAYERS):
        names |= {f"blk.{i}.{old}.weight": f"model.layers.{i}.{new}.weight" for old, new in parts.items()}
    assert found.keys() == set(names.values())
    for old, array in tiny_tensors().items():
        kind = quantisation(old)
        expected = dequantize(quantize(array, kind), kind).astype(ml_dtypes.bfloat16)
        assert found[names[old]].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(found[names[old]], expected, err_msg=old)


def test_conversion_of_config_and_tokenizer(tmp_path: Path) -> None:
    model = tmp_path / "model"
    convert_gguf(write_gguf(tmp_path / "tiny.gguf"), model, silent)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "vocab_size": len(TOKENS),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    assert config.items() >= expected.items()
    generation = json.loads((model / "generation_config.json").read_text(encoding="utf-8"))
    assert generation["eos_token_id"] == 2
    assert sampling_defaults(model, "auto") == {"temperature": 0.2, "top_p": 0.9}
    settings = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert settings["chat_template"] == TEMPLATE
    assert settings["eos_token"] == "<|im_end|>"
    assert [entry["content"] for entry in settings["added_tokens_decoder"].values()] == SPECIALS

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    # No "12": the smollm split parts the digits before any merge.
    assert tokenizer.encode("<|im_start|>hello world12").tokens == [
        "<|im_start|>", "hello", "Ġw", "o", "r", "l", "d", "1", "2",
    ]  # fmt: skip
    text = " Größe, 東京\n\n  42 🎉"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def infinite() -> dict[str, Array]:
    return {"output_norm.weight": np.full(HIDDEN, 3.4e38, np.float32)}  # finite, but rounds to infinity


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "gemma3"}, "general.architecture is 'gemma3'"),
        ({"meta": {"tokenizer.ggml.model": "llama"}}, "tokenizer.ggml.model is 'llama'"),
        ({"meta": {"tokenizer.ggml.pre": "llama-bpe"}}, "tokenizer.ggml.pre is 'llama-bpe'"),
        ({"meta": {"tokenizer.ggml.add_bos_token": True}}, "tokenizer.ggml.add_bos_token is True"),
        ({"meta": {"llama.rope.scaling.type": "linear"}}, r"unknown settings \['llama.rope.scaling.type'\]"),
        ({"meta": {"llama.expert_count": 8}}, "llama.expert_count"),
        ({"meta": {"tokenizer.chat_template": None}}, r"missing \['tokenizer.chat_template'\]"),
        ({"meta": {"llama.vocab_size": 9}}, "vocab_size"),
        ({"meta": {"tokenizer.ggml.token_type": [4] * len(TOKENS)}}, r"token types \[4\]"),
        ({"tensors": {"output.weight": np.zeros((len(TOKENS), HIDDEN), np.float32)}}, "output.weight"),
        ({"meta": {"llama.block_count": LAYERS + 1}}, "blk.2.attn_k.weight"),
        ({"meta": {"llama.feed_forward_length": 32}}, r"ffn_\w+.weight has the shape"),
        ({"tensors": infinite()}, "output_norm.weight has values that bf16 cannot hold"),
    ],
)
def test_other_models_are_refused_by_name(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", **change)
    with pytest.raises(DemoError, match=message) as caught:
        convert_gguf(source, tmp_path / "model", silent)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [source]  # neither a model nor leftovers


def test_what_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_bytes(b"not a model" * 10)
    with pytest.raises(DemoError, match=r"text.gguf is not a readable GGUF file"):
        convert_gguf(tmp_path / "text.gguf", tmp_path / "model", silent)


def test_a_conversion_that_fails_late_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    seen: list[str] = []

    def interrupt(meta: dict[str, Any]) -> Tokenizer:
        seen.extend(path.name for path in tmp_path.rglob("*.safetensors"))
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_build_tokenizer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        convert_gguf(source, tmp_path / "model", silent)
    assert seen == ["model.safetensors"]  # it had begun
    assert list(tmp_path.iterdir()) == [source]


def test_a_directory_in_the_way_is_not_touched(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.txt").write_text("keep")
    with pytest.raises(OSError):
        convert_gguf(source, tmp_path / "model", silent)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["mine.txt"]


@pytest.fixture
def fetches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The tiny model in place of the download; the list has a folder for each time it was fetched."""
    source = write_gguf(tmp_path_factory.mktemp("source") / "tiny.gguf")
    folders: list[Path] = []

    def fetch(work: Path, progress: demo.Progress) -> Path:
        folders.append(work)
        return Path(shutil.copy(source, work / "model.gguf"))

    monkeypatch.setattr(demo, "_fetch_gguf", fetch)
    return folders


def test_the_second_call_does_nothing(fetches: list[Path], tmp_path: Path) -> None:
    lines: list[str] = []
    first = demo_model_directory(tmp_path, lines.append)
    assert first == tmp_path / "demo" / demo.MODEL_FOLDER
    assert any(line.startswith("converting 20 tensors") for line in lines)
    lines.clear()
    assert demo_model_directory(tmp_path, lines.append) == first
    assert lines == []
    assert len(fetches) == 1
    assert sorted(path.name for path in first.parent.iterdir()) == [".lock", first.name]


def test_leftovers_and_damage_are_mended(fetches: list[Path], tmp_path: Path) -> None:
    model = demo_model_directory(tmp_path, silent)
    (model / "tokenizer.json").unlink()
    (model.parent / ".partial-killed" / "model").mkdir(parents=True)
    assert demo_model_directory(tmp_path, silent) == model
    assert (model / "tokenizer.json").is_file()
    assert sorted(path.name for path in model.parent.iterdir()) == [".lock", model.name]


def test_callers_at_the_same_time_share_one_conversion(fetches: list[Path], tmp_path: Path) -> None:
    # Locks belong to open files, so threads contend just as processes do.
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(demo_model_directory(tmp_path, silent))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [tmp_path / "demo" / demo.MODEL_FOLDER] * 4
    assert len(fetches) == 1


def test_without_locks_the_last_rename_decides(
    fetches: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(handle: Any, operation: int) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(demo.fcntl, "flock", no_locks)
    convert, rivals = convert_gguf, []

    def convert_after_a_rival(source: Path, target: Path, progress: demo.Progress) -> None:
        monkeypatch.setattr(demo, "convert_gguf", convert)
        rivals.append(demo_model_directory(tmp_path, silent))  # finishes while we are under way
        convert(source, target, progress)

    monkeypatch.setattr(demo, "convert_gguf", convert_after_a_rival)
    assert demo_model_directory(tmp_path, silent) == rivals[0]
    assert sorted(path.name for path in rivals[0].parent.iterdir()) == [".lock", rivals[0].name]


def test_an_index_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(DemoError, match=r"^pip could not download .* check the network .*$") as caught:
        demo_model_directory(tmp_path, silent)
    assert "No matching distribution" in str(caught.value)
    assert [path.name for path in (tmp_path / "demo").iterdir()] == [".lock"]


def test_a_python_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DemoError, match=f"{sys.executable} -m ensurepip"):
        demo_model_directory(tmp_path, silent)


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DemoError, match="JAXSERVE_CACHE"):
        demo_model_directory(tmp_path / "file", silent)


def test_cache_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("JAXSERVE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == tmp_path / "home" / ".cache" / "jaxserve"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_root() == tmp_path / "home" / ".cache" / "jaxserve"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "jaxserve"
    monkeypatch.setenv("JAXSERVE_CACHE", "~/own")
    assert cache_root() == tmp_path / "home" / "own"


@pytest.mark.demo
def test_the_real_model_tokenizes_as_recorded() -> None:
    data = Path(__file__).parent / "data" / "smollm2-135m-instruct.json"
    recorded = json.loads(data.read_text(encoding="utf-8"))
    model = demo_model_directory()
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for case in recorded["tokenizer"]:
        ids = tokenizer.encode(case["text"], add_special_tokens=False).ids
        assert ids == case["ids"], case["text"]
        assert tokenizer.decode(ids, skip_special_tokens=False) == case["decoded"]

    settings = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = ImmutableSandboxedEnvironment().from_string(settings["chat_template"])
    chats = [case for case in recorded["cases"] if case["kind"] == "chat"]
    assert chats
    for case in chats:
        rendered = template.render(messages=case["messages"], add_generation_prompt=True)
        assert rendered == case["rendered"]
        assert tokenizer.encode(rendered, add_special_tokens=False).ids == case["prompt_ids"]
