"""Compiles the programs of a model for an H200 on a machine without a GPU, and checks what the compiler made of them:

- every byte of the KV cache and the batch state is reused in place (aliased), and no cache is copied;
- a program is one CUDA graph: one command buffer holds all of its kernels.

    pip install --no-deps jax-cuda13-plugin==JAXLIB nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt
    pip download --no-deps jax-cuda13-pjrt==JAXLIB && unzip jax_cuda13_pjrt*.whl -d PJRT
    python bench/compile_h200.py --plugin PJRT/jax_plugins/xla_cuda13/xla_cuda_plugin.so --cuda SITE/nvidia/cu13

(JAXLIB is the installed jaxlib's version, SITE the site-packages.) No GEMM is autotuned without a device, so the choice
of kernels differs from a real run; what is checked here does not depend on it.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plugin", type=Path, required=True, help="xla_cuda_plugin.so")
    parser.add_argument("--cuda", type=Path, required=True, help="folder with bin/ptxas and nvvm/libdevice")
    parser.add_argument("--layers", type=int, default=4, help="layers of the 8B shape to compile")
    parser.add_argument("--attention-backend", default="auto", help="as the server's")
    parser.add_argument("--linear-backend", default="auto", help="as the server's")
    arguments = parser.parse_args()
    backends = {"attention_backend": arguments.attention_backend, "linear_backend": arguments.linear_backend}
    with tempfile.TemporaryDirectory() as dump:
        os.environ["XLA_FLAGS"] = (
            f"--xla_gpu_cuda_data_dir={arguments.cuda} --xla_gpu_autotune_level=0 --xla_dump_to={dump}"
            f" {os.environ.get('XLA_FLAGS', '')}"
        )
        os.environ["PATH"] = f"{arguments.cuda}/bin:{os.environ['PATH']}"
        failures = check_programs(described_h200(arguments.plugin), arguments.layers, backends, Path(dump))
    print("all checks passed" if not failures else f"{failures} checks failed")
    return 1 if failures else 0


def described_h200(plugin: Path) -> Any:
    """A device that is described, not present: programs can be compiled for it."""
    import jax
    from jax._src import xla_bridge
    from jax._src.lib import xla_client
    from jax.experimental import topologies
    from jax_cuda13_plugin import cuda_plugin_extension as extension

    jax.config.update("jax_platforms", "cpu")
    api = xla_bridge.register_plugin("cuda", priority=1, library_path=str(plugin))
    # What the plugin does by itself where it finds a GPU: make the custom calls known.
    xla_client.register_custom_type_handler("CUDA", functools.partial(extension.register_custom_type, api))
    xla_client.register_custom_call_handler("CUDA", functools.partial(extension.register_custom_call_target, api))
    for name, value in extension.ffi_types().items():
        xla_client.register_custom_type(name, value, platform="CUDA")
    for name, value in extension.ffi_handlers().items():
        xla_client.register_custom_call_target(name, value, platform="CUDA", api_version=1)
    if not xla_client.pjrt_plugin_initialized("cuda"):
        xla_client.initialize_pjrt_plugin("cuda")
    target = (HERE / "h200.txtpb").read_text(encoding="utf-8")
    return topologies.get_topology_desc("h200", "cuda", target_config=target, topology="1x1x1").devices[0]


def check_programs(device: Any, layers: int, backends: dict[str, str], dump: Path) -> int:
    """Compile decode, prefill, sampling and prompt programs of the 8B shape; returns the number of failed checks."""
    import numpy as np
    from jax.sharding import Mesh

    from bench.shapes import LLAMA_8B
    from jaxserve.config import EngineConfig
    from jaxserve.models.dummy import param_structs
    from jaxserve.runner.plan import make_plan
    from jaxserve.runner.programs import ProgramBuilder
    from jaxserve.runner.sampler import VARIANTS

    model = LLAMA_8B(layers)
    config = EngineConfig(model="8B", **backends, max_model_len=4096)
    plan = make_plan(config, model, "gpu", device.compute_capability)
    mesh = Mesh(np.array([device]), ("tp",))
    builder = ProgramBuilder(model, plan, param_structs(model, plan.dtype, mesh), mesh, num_blocks=4096)
    buckets = plan.ladder.all()
    wanted = [buckets[0], plan.ladder.choose(256, 0, 0), plan.ladder.choose(0, 2048, 4), plan.ladder.choose(32, 512, 1)]
    failures = 0
    for bucket in wanted:
        failures += report(dump, functools.partial(builder.forward, bucket))
        if bucket.prefill_rows:
            failures += report(dump, functools.partial(builder.finish, bucket))
    for variant in VARIANTS:
        failures += report(dump, functools.partial(builder.sample, 256, variant), graph=False)
    failures += report(dump, builder.score, graph=False)
    failures += report(dump, builder.pool, graph=False)
    return failures


def report(dump: Path, lower: Callable[[], Any], graph: bool = True) -> int:
    """Compile one program (which checks the aliasing) and read its HLO and thunks."""
    before = set(dump.glob("*thunk_sequence*.txt"))
    start = time.monotonic()
    program = lower()
    compiled = program.compile()
    seconds = time.monotonic() - start
    copies = [line.strip() for line in compiled.as_text().splitlines() if re.search(r"= \w+\[4096,16,\S+ copy", line)]
    # The last of them by name is the one after the passes that make command buffers, where those had anything to do.
    text = max(set(dump.glob("*thunk_sequence*.txt")) - before, key=lambda p: len(p.name)).read_text(encoding="utf-8")
    kinds = re.findall(r"^\s*\d+: (k\w+)", text, re.M)
    top = Counter(re.findall(r"^\d+: (k\w+)", text, re.M))
    memory = compiled.memory_analysis()
    good = not copies and (not graph or top["kCommandBuffer"] == 1)
    sizes = f"aliased {memory.alias_size_in_bytes >> 20} MiB, temporary {memory.temp_size_in_bytes >> 20} MiB"
    found = f"{len(copies)} cache copies, top level {dict(top)}, {len(kinds)} thunks"
    print(f"{'ok  ' if good else 'FAIL'} {program.name}: {sizes}, {found}, {seconds:.1f} s", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    sys.exit(main())
