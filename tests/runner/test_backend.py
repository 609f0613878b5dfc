"""Process-wide settings."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import jax
import pytest

from jaxserve.config import EngineConfig
from jaxserve.runner import backend


@pytest.mark.parametrize("writable", [True, False])
def test_a_cache_that_cannot_be_written_is_read_and_said_so(
    writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    settings: dict[str, object] = {}
    monkeypatch.setattr(jax.config, "update", settings.__setitem__)
    monkeypatch.setattr(os, "access", lambda path, mode: writable)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "")
    with caplog.at_level(logging.WARNING):
        backend.configure(EngineConfig(model="demo", compilation_cache_dir=str(tmp_path)))
    assert settings["jax_compilation_cache_dir"] == str(tmp_path)
    assert (settings["jax_persistent_cache_min_compile_time_secs"] == 0.0) == writable
    assert ("cannot be written" in caplog.text) != writable
