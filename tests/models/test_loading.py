"""Reading checkpoints: odd ones load as they should, broken ones give one line that names the culprit.

Nothing is compiled but for the last tests: what loads is compared by the parameters that reach the devices.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from jaxserve.config import EngineConfig
from jaxserve.engine.defaults import sampling_defaults
from jaxserve.engine.llm import LLM
from jaxserve.models.config import MAX_EOS_IDS, CheckpointError, load_model_config
from jaxserve.models.dummy import param_structs
from jaxserve.models.kv_cache import zeros
from jaxserve.models.registry import model_module
from jaxserve.models.weights import INDEX, Checkpoint
from jaxserve.request import SamplingParams
from jaxserve.runner.plan import make_plan
from tests.checkpoints import (
    NAMES,
    REMOVE,
    edit_config,
    make_table_checkpoint,
    read_tensors,
    write_json,
    write_tensors,
)
from tests.conftest import ONE_CHUNK, SMALL

QUERY = "model.layers.0.self_attn.q_proj.weight"
FLOAT32 = np.dtype(np.float32)


def load(directory: Path, dtype: np.dtype = FLOAT32) -> Any:
    """The parameters as NumPy arrays."""
    config = load_model_config(directory)
    module = model_module(config.architecture)
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    into = zeros(param_structs(config, dtype, mesh))
    params = module.load_params(Checkpoint(directory, dtype), config, into, lambda done: None)
    assert all(array.is_deleted() for array in jax.tree.leaves(into)), "their memory is not the parameters'"
    return jax.tree.map(np.asarray, params)


def assert_loads_as(directory: Path, original: Path) -> None:
    got, expected = load(directory), load(original)
    for part, other in zip([*got.pop("layers"), got], [*expected.pop("layers"), expected], strict=True):
        assert part.keys() == other.keys()
        for name in part:
            np.testing.assert_array_equal(part[name], other[name], err_msg=name)


def assert_refused(directory: Path, *culprits: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    for culprit in culprits:
        assert culprit in message


@pytest.fixture
def copy(checkpoint, tmp_path):
    """Copies a checkpoint by name, to be spoiled."""
    return lambda name: Path(shutil.copytree(checkpoint(name), tmp_path / name))


def zeros_like(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.zeros_like(tensor) for name, tensor in tensors.items()}


def shown(value: Any) -> str | None:
    """Changes of a config as a test's id."""
    if not isinstance(value, dict):
        return None
    return ", ".join(f"{key} absent" if new is REMOVE else f"{key} {new}" for key, new in value.items())


# ---------------------------------------------------------------------------- files


def test_ld03_only_files_of_the_index_are_opened(checkpoint, copy):
    directory = copy("tiny-mistral-swa")
    zeros = zeros_like(read_tensors(directory))
    save_file(zeros, directory / "consolidated.safetensors")
    save_file(zeros, directory / "model.safetensors")
    save_file(zeros, directory / "model-00004-of-00004.safetensors")
    (directory / "adapter.safetensors").write_bytes(b"opening this fails")
    assert_loads_as(directory, checkpoint("tiny-mistral-swa"))


def test_ld03_without_an_index_only_model_safetensors_is_opened(checkpoint, copy):
    directory = copy("tiny-llama-3.1")
    save_file(zeros_like(read_tensors(directory)), directory / "consolidated.safetensors")
    (directory / "adapter.safetensors").write_bytes(b"opening this fails")
    assert_loads_as(directory, checkpoint("tiny-llama-3.1"))


def test_ld04_a_stale_index_is_refused(copy):
    """It names thirty shards; fifteen others hold everything."""
    directory = copy("tiny-llama-3.1")
    tensors = read_tensors(directory)
    write_tensors(directory, tensors, shards=15)
    stale = {name: f"model-{i % 30 + 1:05d}-of-00030.safetensors" for i, name in enumerate(tensors)}
    write_json(directory / INDEX, {"weight_map": stale})
    assert_refused(directory, "30 of the 30 shards", INDEX, "model-00001-of-00030.safetensors")


@pytest.mark.parametrize("right", [0, 1], ids=["in the first shard", "in the second shard"])
def test_ld05_the_index_decides_between_two_shards(checkpoint, copy, right):
    directory = copy("tiny-llama-3.1")
    write_tensors(directory, read_tensors(directory), shards=2)
    index = json.loads((directory / INDEX).read_text())
    shards = [directory / name for name in sorted(set(index["weight_map"].values()))]
    held = [load_file(shard) for shard in shards]
    query = held[0].get(QUERY, held[1].get(QUERY))
    held[right][QUERY], held[1 - right][QUERY] = query, query * 0
    for shard, tensors in zip(shards, held, strict=True):
        save_file(tensors, shard)
    index["weight_map"][QUERY] = shards[right].name
    write_json(directory / INDEX, index)
    assert_loads_as(directory, checkpoint("tiny-llama-3.1"))


def test_a_missing_shard(copy):
    directory = copy("tiny-mistral-swa")
    (directory / "model-00002-of-00003.safetensors").unlink()
    assert_refused(directory, "1 of the 3 shards", "model-00002-of-00003.safetensors")


def test_no_weights(copy):
    directory = copy("tiny-llama-3.1")
    (directory / "model.safetensors").unlink()
    assert_refused(directory, str(directory), "neither model.safetensors nor")


def test_a_cut_off_file(copy):
    directory = copy("tiny-llama-3.1")
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert_refused(directory, "model.safetensors is not a readable safetensors file")


@pytest.mark.parametrize(
    ("index", "culprits"),
    [
        ("{", [INDEX, "not a safetensors index"]),
        ('{"weight_map": []}', [INDEX, "not a safetensors index"]),
        ('{"weight_map": {"a": "../model.safetensors"}}', [INDEX, "not a safetensors index"]),
        ('{"weight_map": {"a": "model.safetensors"}}', [INDEX, "model.safetensors holds a, but it does not"]),
        ('{"weight_map": {"model.norm.weight": "model.safetensors"}}', [INDEX, "does not name lm_head.weight"]),
    ],
)
def test_an_index_that_does_not_fit(copy, index, culprits):
    directory = copy("tiny-llama-3.1")
    (directory / INDEX).write_text(index)
    assert_refused(directory, *culprits)


# ---------------------------------------------------------------------------- tensors


def spoil(directory: Path, **changes: np.ndarray | None) -> None:
    """Set tensors, or remove those that are None."""
    tensors = read_tensors(directory) | changes
    write_tensors(directory, {name: tensor for name, tensor in tensors.items() if tensor is not None})


@pytest.mark.parametrize("equal", [True, False])
def test_ld06_a_copy_of_the_tied_embedding_is_ignored(checkpoint, copy, caplog, equal):
    directory = copy("tiny-llama-3.2")
    embedding = read_tensors(directory)["model.embed_tokens.weight"]
    spoil(directory, **{"lm_head.weight": embedding if equal else embedding * 2})
    assert_loads_as(directory, checkpoint("tiny-llama-3.2"))
    assert ("lm_head.weight differs" in caplog.text) is not equal


def test_ld08_saved_rotary_buffers_are_skipped(checkpoint, copy):
    directory = copy("tiny-llama-2")
    for buffer in ("inv_freq", "cos_cached", "sin_cached"):
        spoil(directory, **{f"model.layers.0.self_attn.rotary_emb.{buffer}": np.ones(16, np.float32)})
    assert_loads_as(directory, checkpoint("tiny-llama-2"))


def test_ld08_any_other_unknown_tensor_is_refused(copy):
    directory = copy("tiny-llama-2")
    spoil(directory, **{"model.layers.0.self_attn.q_norm.weight": np.ones(32, np.float32)})
    assert_refused(directory, "unknown tensors", "model.layers.0.self_attn.q_norm.weight")


def test_a_bias_that_config_json_denies_is_refused(copy):
    """It would change the answer, were it dropped."""
    directory = copy("tiny-llama-bias")
    edit_config(directory, mlp_bias=False)
    assert_refused(directory, "unknown tensors", "mlp.down_proj.bias")


@pytest.mark.parametrize("name", [QUERY, "model.layers.3.mlp.down_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_a_missing_tensor(copy, name):
    directory = copy("tiny-llama-3.1")
    spoil(directory, **{name: None})
    assert_refused(directory, f"tensor {name} is missing")


@pytest.mark.parametrize("name", [QUERY, "model.embed_tokens.weight", "lm_head.weight"])
def test_a_transposed_tensor(copy, name):
    directory = copy("tiny-llama-3.1")
    tensor = np.ascontiguousarray(np.zeros((128, 72), np.float32))
    spoil(directory, **{name: tensor})
    assert_refused(directory, f"tensor {name} has shape (128, 72), expected (")


def test_a_tensor_of_integers(copy):
    """Quantised weights read as numbers would be noise."""
    directory = copy("tiny-llama-3.1")
    spoil(directory, **{QUERY: np.ones((128, 128), np.int8)})
    assert_refused(directory, f"tensor {QUERY} has dtype I8")


def test_another_vocabulary_size(copy):
    directory = copy("tiny-llama-3.1")
    edit_config(directory, vocab_size=512)
    assert_refused(directory, "model.embed_tokens.weight has shape (520, 128), expected (512, 128)")


def test_more_layers_than_there_are(copy):
    directory = copy("tiny-llama-3.1")
    edit_config(directory, num_hidden_layers=5)
    assert_refused(directory, "tensor model.layers.4.", "is missing")


def test_fewer_layers_than_there_are(copy):
    directory = copy("tiny-llama-3.1")
    edit_config(directory, num_hidden_layers=3)
    assert_refused(directory, "unknown tensors", "model.layers.3.", "and 6 more")


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("computed", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_every_float_type_loads_as_every_other(copy, stored, computed):
    directory = copy("tiny-llama-bias")
    tensors = {name: tensor.astype(stored) for name, tensor in read_tensors(directory).items()}
    write_tensors(directory, tensors)
    params = load(directory, np.dtype(computed))
    assert params["embed"].dtype == computed
    np.testing.assert_array_equal(params["embed"], tensors["model.embed_tokens.weight"].astype(computed))
    np.testing.assert_array_equal(
        params["layers"][0]["o_bias"], tensors["model.layers.0.self_attn.o_proj.bias"].astype(computed)
    )


def test_bfloat16_keeps_every_value(tmp_path):
    """Widening by bits, infinities and NaN included."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    save_file({"all": bits.view(ml_dtypes.bfloat16)}, tmp_path / "model.safetensors")
    got = Checkpoint(tmp_path, FLOAT32).get("all", 1 << 16)
    np.testing.assert_array_equal(got.view(np.uint32), bits.astype(np.uint32) << 16)


# ---------------------------------------------------------------------------- config.json


LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("changes", "culprits"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["architecture GPT2LMHeadModel", "LlamaForCausalLM"]),
        ({"architectures": None}, ["architecture None"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["RoPE type 'yarn'", "default, linear, llama3"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["RoPE type 'dynamic'"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor", "None"]),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, ["factor", "'2'"]),
        ({"rope_scaling": {**LLAMA_3_ROPE, "mscale": 0.7}}, ["rope_scaling.mscale"]),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, ["rope_parameters and rope_scaling differ"]),
        ({"rope_scaling": "linear"}, ["rope_scaling", "'linear'"]),
        ({"rope_theta": "big"}, ["rope_theta", "'big'"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"sliding_window": 16}, ["sliding_window", "LlamaForCausalLM"]),
        ({"hidden_size": "128"}, ["hidden_size", "'128'"]),
        ({"num_hidden_layers": REMOVE}, ["num_hidden_layers", "None"]),
        ({"vocab_size": 0}, ["vocab_size", "0"]),
        ({"num_key_value_heads": 3}, ["8 attention heads", "3 KV heads"]),
        ({"rms_norm_eps": "small"}, ["rms_norm_eps", "'small'"]),
    ],
    ids=shown,
)
def test_what_config_json_may_not_say(copy, changes, culprits):
    directory = copy("tiny-llama-3.1")
    edit_config(directory, **changes)
    assert_refused(directory, "config.json", *culprits)


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "\udcff"], ids=repr)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_unreadable_json(copy, name, text):
    directory = copy("tiny-llama-3.1")
    (directory / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert_refused(directory, str(directory / name))


def test_no_config_and_no_directory(copy, tmp_path):
    directory = copy("tiny-llama-3.1")
    (directory / "config.json").unlink()
    assert_refused(directory, "config.json does not exist")
    assert_refused(tmp_path / "nowhere", "nowhere is not a directory")


def test_ld11_sliding_window(copy):
    directory = copy("tiny-mistral-swa")  # 512 positions

    def windows(**changes: Any) -> set[int | None]:
        edit_config(directory, **changes)
        return set(load_model_config(directory).windows)

    assert windows() == {16}
    assert windows(sliding_window=4096) == {4096}, "larger than the context: it never cuts anything off"
    assert windows(use_sliding_window=False) == {None}
    assert windows(use_sliding_window=True) == {4096}
    assert windows(sliding_window=None) == {None}
    assert windows(sliding_window=REMOVE, use_sliding_window=REMOVE) == {4096}, "what transformers takes it for"
    for wrong in (0, -1, "4096", 4096.0):
        edit_config(directory, sliding_window=wrong)
        assert_refused(directory, "sliding_window", repr(wrong))
    assert load_model_config(copy("tiny-llama-3.1")).windows == (None,) * 4


def test_ld11_llama_may_say_null(copy):
    directory = copy("tiny-llama-3.1")
    edit_config(directory, sliding_window=None)
    assert set(load_model_config(directory).windows) == {None}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"torch_dtype": None, "dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": REMOVE, "dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16", "dtype": None}, "float16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float32", "dtype": "float16"}, "float16"),
        ({"torch_dtype": REMOVE}, "float32"),
    ],
    ids=shown,
)
def test_ld13_dtype(copy, caplog, changes, expected):
    """The newer key wins, null counts as absent; and what follows from it is logged at start."""
    directory = copy("tiny-llama-3.1")
    edit_config(directory, **changes)
    config = load_model_config(directory)
    assert config.checkpoint_dtype == expected
    with caplog.at_level(logging.INFO):
        plan = make_plan(EngineConfig(model=str(directory)), config, "gpu")
    computed = "float16" if expected == "float16" else "bfloat16"  # on a GPU; float32 only if asked for
    assert plan.dtype == np.dtype(computed)
    assert f"computing in {computed} (the checkpoint says {expected})" in caplog.text


def test_ld13_an_unknown_dtype_is_refused_unless_one_is_chosen(copy):
    directory = copy("tiny-llama-3.1")
    edit_config(directory, torch_dtype="float8_e4m3fn")
    config = load_model_config(directory)
    with pytest.raises(CheckpointError, match=r"config\.json: dtype 'float8_e4m3fn'"):
        make_plan(EngineConfig(model=str(directory)), config, "cpu")
    assert make_plan(EngineConfig(model=str(directory), dtype="float32"), config, "cpu").dtype == np.float32


def test_both_spellings_of_rope_mean_the_same(copy):
    old, new = copy("tiny-llama-3.1"), copy("tiny-llama-3.2")
    raw = json.loads((old / "config.json").read_text())
    edit_config(new, rope_parameters={**raw["rope_scaling"], "rope_theta": raw["rope_theta"]})
    assert load_model_config(new).rope == load_model_config(old).rope
    assert load_model_config(old).rope.theta == 500000.0


@pytest.mark.parametrize("name", NAMES)
def test_eos_ids_of_both_files(checkpoint, name):
    expected = json.loads((Path(__file__).parent.parent / "data" / f"{name}.json").read_text(encoding="utf-8"))[
        "eos_ids"
    ]
    assert load_model_config(checkpoint(name)).eos_token_ids == set(expected)


def test_an_eos_id_that_the_model_cannot_generate_is_left_out(copy, caplog):
    """A fine-tune's tokenizer may have more tokens than its embedding."""
    directory = copy("tiny-llama-3.1")
    known = load_model_config(directory).eos_token_ids
    edit_config(directory, eos_token_id=[*known, 100_000])
    assert load_model_config(directory).eos_token_ids == known
    assert "[100000]" in caplog.text


def test_too_many_eos_ids_are_refused(copy):
    directory = copy("tiny-llama-3.1")
    edit_config(directory, eos_token_id=list(range(MAX_EOS_IDS + 1)))
    with pytest.raises(CheckpointError, match="at most 32 tokens may end an answer"):
        load_model_config(directory)


# ---------------------------------------------------------------------------- generation_config.json

EOS, OTHER_EOS = 518, 513


@pytest.fixture(scope="module")
def looping(tmp_path_factory) -> Path:
    """A model that runs from token 1 through both of its EOS ids and back."""
    directory = make_table_checkpoint(
        tmp_path_factory.mktemp("looping"), {1: OTHER_EOS, OTHER_EOS: 2, 2: EOS, EOS: 1}, max_position_embeddings=256
    )
    generation = json.loads((directory / "generation_config.json").read_text())
    write_json(directory / "generation_config.json", generation | {"temperature": 0.1, "top_k": 1})
    return directory


@pytest.fixture(scope="module")
def looping_llm(looping) -> LLM:
    return LLM(looping, **{**SMALL, **ONE_CHUNK})


def test_ld17_explicit_fields_win_and_the_file_fills_the_rest(looping_llm):
    params = looping_llm.default_sampling_params(temperature=10.0)
    assert (params.temperature, params.top_k, params.top_p) == (10.0, 1, 1.0)
    assert looping_llm.default_sampling_params().temperature == 0.1
    [output] = looping_llm.generate([1], params)
    assert output.outputs[0].token_ids == [OTHER_EOS], "at temperature 10 any token, but for top_k 1"


def test_ld17_defaults_can_be_turned_off_or_taken_from_elsewhere(looping, tmp_path):
    assert sampling_defaults(looping, "auto") == {"temperature": 0.1, "top_k": 1}
    assert sampling_defaults(looping, "vllm") == {}
    write_json(tmp_path / "generation_config.json", {"top_p": 0.5, "top_k": None, "eos_token_id": 3})
    assert sampling_defaults(looping, str(tmp_path)) == {"top_p": 0.5}
    with pytest.raises(CheckpointError, match=r"--generation-config: .*missing/generation_config.json does not exist"):
        sampling_defaults(looping, str(tmp_path / "missing"))


@pytest.mark.parametrize("wrong", ["0.5", True, [1]])
def test_ld17_a_default_that_is_no_number_is_refused(tmp_path, wrong):
    write_json(tmp_path / "generation_config.json", {"temperature": wrong})
    with pytest.raises(CheckpointError, match=r"generation_config\.json: temperature must be a number"):
        sampling_defaults(tmp_path, "auto")


def test_ld18_ignore_eos_ignores_every_eos_id(looping_llm):
    def answer(**options: Any):
        [output] = looping_llm.generate([EOS], SamplingParams(temperature=0.0, max_tokens=200, **options))
        return output.outputs[0]

    ignoring = answer(ignore_eos=True)
    assert len(ignoring.token_ids) == 200 and ignoring.finish_reason == "length"
    assert ignoring.token_ids[:4] == [1, OTHER_EOS, 2, EOS]
    stopped = answer()
    assert stopped.token_ids == [1, OTHER_EOS] and stopped.finish_reason == "stop"
