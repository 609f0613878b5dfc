"""The made checkpoints are those that the references in tests/data were recorded from."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.checkpoints import (
    KINDS,
    NAMES,
    REMOVE,
    byte_tokens,
    edit_config,
    make_checkpoint,
    make_table_checkpoint,
    read_tensors,
    weights_sha256,
    write_tensors,
)

DATA = Path(__file__).parent / "data"


def reference(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return value


@pytest.mark.parametrize("name", NAMES)
def test_weights_have_the_recorded_hash(name: str, tmp_path: Path) -> None:
    directory = make_checkpoint(name, tmp_path)
    assert weights_sha256(read_tensors(directory)) == reference(name)["weights_sha256"]


@pytest.mark.parametrize("name", NAMES)
def test_tokenizer_gives_the_recorded_ids(name: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(make_checkpoint(name, tmp_path) / "tokenizer.json"))
    recorded = reference(name)
    for case in recorded["tokenizer"]:
        assert tokenizer.encode(case["text"], add_special_tokens=False).ids == case["ids"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["decoded"]
    for case in recorded["cases"]:
        if case["kind"] == "text":
            assert tokenizer.encode(case["prompt"]).ids == case["prompt_ids"]
        if case["kind"] == "chat":
            assert tokenizer.encode(case["rendered"], add_special_tokens=False).ids == case["prompt_ids"]
        if "text" in case:
            assert tokenizer.decode(case["generated_ids"]) == case["text"]


@pytest.mark.parametrize("name", NAMES)
def test_recorded_logits_belong_to_the_recorded_cases(name: str) -> None:
    cases = reference(name)["cases"]
    with np.load(DATA / f"{name}.npz") as logits:
        assert logits["first"].argmax(-1).tolist() == [case["generated_ids"][0] for case in cases]
        assert logits["prompt_rows"][-1] == len(cases[0]["prompt_ids"]) - 1
        np.testing.assert_array_equal(logits["prompt"][-1], logits["first"][0])


def test_tensors_come_back_from_any_number_of_shards(tmp_path: Path) -> None:
    tensors = read_tensors(make_checkpoint("tiny-mistral-swa", tmp_path))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    for shards in (1, 2):
        write_tensors(tmp_path, tensors, shards)
        assert len(list(tmp_path.glob("model*"))) == (1 if shards == 1 else shards + 1)
        assert weights_sha256(read_tensors(tmp_path)) == weights_sha256(tensors)


def test_edit_config_sets_nulls_and_removes(tmp_path: Path) -> None:
    make_checkpoint("tiny-llama-2", tmp_path)
    edit_config(tmp_path, head_dim=32, sliding_window=None, hidden_act=REMOVE)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["head_dim"] == 32
    assert config["sliding_window"] is None
    assert "hidden_act" not in config
    assert config["hidden_size"] == 128


@pytest.mark.parametrize("kind", KINDS)
def test_table_checkpoint_follows_its_table(kind: str, tmp_path: Path) -> None:
    first, second = byte_tokens("é".encode(), kind)
    make_table_checkpoint(tmp_path, {first: second, second: {first: 3.0, 0: -5.0}}, kind=kind)
    weights = read_tensors(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.decode([first, second]) == "é"
    assert not weights["model.layers.0.self_attn.o_proj.weight"].any()
    assert not weights["model.layers.0.mlp.down_proj.weight"].any()
    hidden = weights["model.embed_tokens.weight"]  # to which the layer adds nothing
    hidden = hidden / np.sqrt(np.square(hidden).mean(-1, keepdims=True) + config["rms_norm_eps"])
    logits = hidden * weights["model.norm.weight"] @ weights["lm_head.weight"].T

    expected = np.zeros_like(logits)
    expected[:, tokenizer.token_to_id(KINDS[kind].named["eos_token"])] = 30.0
    expected[[first, second]] = 0.0
    expected[first, second] = 30.0
    expected[second, first], expected[second, 0] = 3.0, -5.0
    np.testing.assert_allclose(logits, expected, rtol=1e-6)
