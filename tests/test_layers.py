"""The house: imports go downward only, and processes that serve HTTP never load jax."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# What each package may import of the others; modules at the top of jaxserve (config, request, …) are open to all.
ALLOWED = {
    "pallas_kernels": set(),
    "jaxserve.models": {"pallas_kernels"},
    "jaxserve.scheduling": set(),
    "jaxserve.runner": {"jaxserve.scheduling", "jaxserve.models", "pallas_kernels"},
    "jaxserve.engine": {"jaxserve.runner", "jaxserve.scheduling", "jaxserve.models"},
    "jaxserve.server": {"jaxserve.engine"},
}


def imports(path: Path) -> set[str]:
    """Full names of all modules that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_imports_go_downward_only():
    for package, allowed in ALLOWED.items():
        for path in (ROOT / package.replace(".", "/")).rglob("*.py"):
            for name in imports(path):
                layer = next((p for p in ALLOWED if name == p or name.startswith(p + ".")), None)
                assert layer in allowed | {package, None}, f"{path.relative_to(ROOT)} imports {name}"
                if package == "pallas_kernels":
                    assert not name.startswith("jaxserve"), f"{path.relative_to(ROOT)} imports {name}"


def test_scheduling_and_server_processes_do_without_jax():
    modules = ["jaxserve.server.process", "jaxserve.server.launch", "jaxserve.cli", "jaxserve.scheduling.scheduler"]
    code = f"import sys, {', '.join(modules)}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
