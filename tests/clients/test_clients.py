"""Clients as their users run them, each a program of its own, against a server whose answers are known.

The Python ones need an environment of ``requirements.txt``, the JavaScript one a folder with ``node_modules/openai``;
``make test-all`` makes both in ``.venv`` and names them in JAXSERVE_CLIENTS.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.request import EngineRequest
from jaxserve.tokenizer import Tokenizer
from tests.server.conftest import Served, encode_answer, serve
from tests.server.obedient import obedient
from tests.server.test_tools import TEMPLATE, hermes

HERE = Path(__file__).parent
CLIENTS = Path(os.environ.get("JAXSERVE_CLIENTS", "nowhere"))
SECONDS = 180

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """It obeys grammars, calls a tool when a conversation ends with a question about the weather, and else greets."""
    template = tmp_path_factory.mktemp("templates") / "tools.jinja"
    template.write_text(TEMPLATE)
    tokenizer = Tokenizer.load(checkpoint("tiny-llama-3.1"), template)
    eos_id = tokenizer.encode("<|eot_id|>", False)[0]
    obey = obedient(tokenizer, eos_id)
    call, hello = (
        encode_answer(tokenizer, text) for text in (hermes(("get_weather", {"city": "Bern"})), "Hello there!")
    )

    def script(request: EngineRequest):
        if request.sampling.structured:
            return obey(request)
        asked = tokenizer.decode(request.prompt_token_ids).endswith("[user|How is the weather?|]")
        return [*(call if asked else hello), eos_id]

    flags = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
    with serve(tokenizer, eos_id, context=4096, **flags) as served:
        served.engine.script = script
        yield served


def run(command: list[str | Path], cwd: Path, url: str) -> None:
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}
    result = subprocess.run(
        [*command, f"{url}/v1"], cwd=cwd, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-5000:]


@pytest.mark.parametrize("name", ["openai", "langchain", "litellm", "instructor"])
def test_python(server: Served, tmp_path: Path, name: str) -> None:
    python = CLIENTS / "bin" / "python"
    if not python.exists():
        pytest.skip("JAXSERVE_CLIENTS names no environment with the clients; make test-all makes one")
    run([python, HERE / f"use_{name}.py"], tmp_path, server.url)


def test_node(server: Served, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None or not (CLIENTS / "node_modules" / "openai").exists():
        pytest.skip("Node or its openai package is not there; make test-all installs the package where npm is")
    # Node looks for packages beside the program.
    (tmp_path / "node_modules").symlink_to(CLIENTS / "node_modules")
    program = Path(shutil.copy(HERE / "use_node.mjs", tmp_path))
    run([node, program], tmp_path, server.url)
