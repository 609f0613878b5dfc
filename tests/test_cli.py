"""Flags: what they come to, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxserve import cli
from jaxserve.config import ServerConfig
from jaxserve.engine.defaults import check_model, sampling_defaults
from jaxserve.flags_file import with_flags_file
from tests.checkpoints import make_checkpoint


def config_of(*argv: str) -> ServerConfig:
    parser = cli.make_parser()
    return cli.make_config(vars(parser.parse_args(with_flags_file(["--model", "demo", *argv], parser))))


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--trust-remote-code"], "nothing from a checkpoint"),
        (["--quantization", "awq"], "not supported yet"),
        (["--speculative-config", "{}"], "not supported yet"),
        (["--kv-cache-dtype", "fp8"], "choose from"),
        (["--enforce-eager"], "no eager mode"),
        (["--tensor-parallel-size", "2"], "not supported yet"),
        (["--lora-modules", "a=b", "c=d"], "not supported yet"),
        (["--override-generation-config", "[1]"], "not a JSON object"),
        (["--max-logprobs", "1001"], "between 0 and 1000"),
    ],
)
def test_flags_that_are_refused_by_name(argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", "nowhere", *argv])
    error = capsys.readouterr().err.splitlines()[-1]
    assert caught.value.code == 2 and argv[0] in error and reason in error


def test_pooling() -> None:
    assert config_of().pooling == "last" and config_of("--pooling", "mean").pooling == "mean"


def test_flags_that_change_nothing_are_taken() -> None:
    assert config_of("--disable-log-requests", "--enable-chunked-prefill", "--kv-cache-dtype", "auto")


def test_flags_from_a_file_and_the_command_line_before_it(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "max-model-len: 128\nport: 1\nserved_model_name: [a, b]\nrow-buckets: [1, 4]\naccept-any-model: true\n"
        "enable-force-include-usage: false\noverride-generation-config: {temperature: 0.5}\ndtype: null\n"
    )
    config = config_of("--port", "2", "--config", str(file))
    assert (config.port, config.engine.max_model_len, config.model_names) == (2, 128, ("a", "b"))
    assert config.engine.row_buckets == (1, 4) and config.engine.override_generation_config == {"temperature": 0.5}
    assert config.accept_any_model and not config.enable_force_include_usage


@pytest.mark.parametrize(
    ("text", "named"),
    [("frobnicate: 1", "frobnicate"), ("- a", "mapping"), ("a: [", "cannot be read"), (None, "cannot")],
)
def test_files_that_will_not_do(tmp_path: Path, text: str | None, named: str) -> None:
    file = tmp_path / "serve.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=named) as caught:
        config_of("--config", str(file))
    assert str(file) in str(caught.value)


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
