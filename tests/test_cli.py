"""Flags: what they come to, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxserve import cli
from jaxserve.config import ServerConfig, not_a_model
from jaxserve.engine.defaults import check_model, sampling_defaults
from jaxserve.vllm_flags import OPTIONS, SWITCHES
from tests.checkpoints import make_checkpoint


def config_of(*argv: str) -> ServerConfig:
    return cli.parse(["--model", "demo", *argv])


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command line that cannot be says: one line."""
    assert cli.main([*argv]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("jaxserve: ") and line.endswith("; see jaxserve --help")
    return line


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--trust-remote-code"], "nothing from a checkpoint"),
        (["--quantization", "awq"], "not supported yet"),
        (["--speculative-config", "{}"], "not supported yet"),
        (["--kv-cache-dtype", "fp8"], "choose from"),
        (["--enforce-eager"], "no eager mode"),
        (["--no-enable-chunked-prefill"], "always computed in chunks"),
        (["--async-scheduling"], "--async-depth"),
        (["--no-async-scheduling"], "--async-depth"),
        (["--tensor-parallel-size", "2"], "not supported yet"),
        (["--pipeline-parallel-size", "2"], "not supported"),
        (["-pp", "2"], "not supported"),
        (["--lora-modules", "a=b", "c=d"], "not supported yet"),
        (["--device", "cuda"], "JAX_PLATFORMS"),
        (["--task", "embed"], "one server"),
        (["--override-generation-config", "[1]"], "not a JSON object"),
        (["--max-logprobs", "1001"], "between 0 and 1000"),
        (["--kv-cache-memory-bytes", "0"], "at least 1"),
        (["--served-model-name", ""], "must not be empty"),
        (["--prot", "1"], "--port is"),
        (["--config"], "expected one argument"),
    ],
)
def test_flags_that_are_refused_by_name(argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, "serve", "nowhere", *argv)
    assert argv[0] in line and reason in line


def test_all_flags_of_vllms_have_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    for names, (_, reason) in OPTIONS.items():
        assert reason in refusal(capsys, "--model", "demo", names.split()[0], "something")
    for name, (default, reason) in SWITCHES.items():
        refused = {True: [f"--no-{name[2:]}"], False: [name], None: [name, f"--no-{name[2:]}"]}[default]
        for flag in refused:
            assert f"{flag}: {reason}" in refusal(capsys, "--model", "demo", flag)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "--model is missing"),
        (["serve"], "--model is missing"),
        (["demo"], "jaxserve serve demo"),
        (["serve", "a", "--model", "b"], "serve a"),
        (["serve", "--port", "1", "demo"], "jaxserve serve demo"),
    ],
)
def test_command_lines_that_name_no_model_or_two(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, *argv)


def test_the_model_after_serve() -> None:
    assert cli.parse(["serve", "a/b", "--port", "1"]).engine.model == "a/b"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("org/name-1.5B", "'hf download org/name-1.5B --local-dir name-1.5B'"),
        ("/no/where", "/no/where is not a directory; --model takes"),
        ("../no-where", "../no-where is not a directory; --model takes"),
        (".", ". is not a model directory: it has no config.json"),
    ],
)
def test_models_that_are_none(model: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in not_a_model(model)


def test_pooling() -> None:
    assert config_of().pooling == "last" and config_of("--pooling", "mean").pooling == "mean"


@pytest.mark.parametrize(
    "line",
    [
        "--disable-log-requests --no-enable-log-requests --enable-chunked-prefill --task generate",
        "--no-enforce-eager --kv-cache-dtype auto --device auto --runner auto --guided-decoding-backend auto",
        "--pipeline-parallel-size 1 -tp 1 -dp 1 --response-role assistant --distributed-executor-backend uni",
    ],
)
def test_flags_that_change_nothing_are_taken(line: str) -> None:
    assert config_of(*line.split()) == config_of()


def test_spellings_of_vllms() -> None:
    config = config_of("--max_model_len=64", "--kv_cache_memory_bytes", "1GiB", "--served-model-name", "a_b").engine
    assert (config.max_model_len, config.kv_cache_memory) == (64, 1 << 30)
    assert config_of("--kv-cache-memory", "5").engine.kv_cache_memory == 5
    assert [config_of("--dtype", name).engine.dtype for name in ("half", "float")] == ["float16", "float32"]
    assert config_of("--max-model-len", "-1").engine.max_model_len == "auto"
    assert config_of("--served_model_name", "a_b").model_names == ("a_b",)


def test_flags_from_a_file_and_the_command_line_before_it(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "max-model-len: 128\nport: 1\nserved_model_name: [a, b]\nrow-buckets: [1, 4]\naccept-any-model: true\n"
        "enable-force-include-usage: false\noverride-generation-config: {temperature: 0.5}\ndtype: null\n"
        "enable-prefix-caching: false\napi-key: -k\ntrust-remote-code: false\nkv-cache-memory: nothing\n"
    )
    config = config_of("--port", "2", "--kv-cache-memory-bytes", "5", "--config", str(file))
    assert (config.port, config.engine.max_model_len, config.model_names) == (2, 128, ("a", "b"))
    assert config.engine.row_buckets == (1, 4) and config.engine.override_generation_config == {"temperature": 0.5}
    assert config.accept_any_model and not config.enable_force_include_usage
    assert not config.engine.enable_prefix_caching and config.api_key == ("-k",) and config.engine.kv_cache_memory == 5


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("frobnicate: 1", "frobnicate"),
        ("- a", "mapping"),
        ("a: [", "cannot be read"),
        (None, "cannot"),
        ("port: abc", "port: --port: invalid"),
        ("port: 99999", "port: --port must be between"),
        ("port: false", "port: --port: invalid"),
        ("kv_cache_memory: 0", "kv_cache_memory: --kv-cache-memory-bytes must be"),
        ("trust_remote_code: true", "trust_remote_code: --trust-remote-code: nothing from"),
        ("accept-any-model: 1", "accept-any-model must be true or false"),
    ],
)
def test_files_that_will_not_do(
    tmp_path: Path, text: str | None, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.yaml"
    if text is not None:
        file.write_text(text)
    line = refusal(capsys, "--model", "demo", "--config", str(file))
    assert str(file) in line and named in line


def test_a_fault_of_the_command_line_is_not_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 1\nhost: localhost\n")
    assert str(file) not in refusal(capsys, "--model", "demo", "--config", str(file), "--port", "x")
    assert str(file) not in refusal(capsys, "--model", "demo", "--config", str(file), "--block-size", "7")


@pytest.mark.parametrize("override", [{"max_new_tokens": 5}, {"temperature": "hot"}, {"temperature": -1}, {"top_p": 2}])
def test_overrides_that_cannot_be(tmp_path: Path, override: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"--override-generation-config: .*{next(iter(override))}"):
        sampling_defaults(tmp_path, "vllm", override)


def test_overrides_go_before_the_models_defaults(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9}')
    assert sampling_defaults(tmp_path, "auto", {"temperature": 0}) == {"temperature": 0, "top_p": 0.9}


def test_a_length_beyond_the_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    directory = make_checkpoint("tiny-llama-3.1", tmp_path)
    check_model(config_of("--max-model-len", "64").engine, directory)
    with pytest.raises(ValueError, match="--max-model-len 999999999 is more than the model's"):
        check_model(config_of("--max-model-len", "999999999").engine, directory)
