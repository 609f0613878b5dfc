"""Launches the kernels of a chain (``triton_chain``): the handler of its custom call.

Kernels are compiled by Triton as soon as a chain is announced, in threads of their own; a program that has the chain in
it is not ready before they are.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import Language

from pallas_kernels import cuda_driver, triton_call, xla_ffi
from pallas_kernels.cuda_driver import Function, LaunchSequence
from pallas_kernels.kept import kept
from pallas_kernels.triton_call import TARGET, compiler, find_parameters

TARGET_NAME = "jaxserve_kernels"
HIDDEN_POINTERS = 2
"""That Triton adds to a kernel's parameters: scratch memory and a profile's, which none of ours use."""


@dataclass(frozen=True)
class Kernel:
    """A kernel in Triton's IR, or Gluon's, whose parameters are pointers."""

    name: str
    ir: str
    num_warps: int
    num_stages: int

    @property
    def is_gluon(self) -> bool:
        return "ttg.num-warps" in self.ir


@dataclass(frozen=True)
class Launch:
    """A kernel and, for each of its pointers, the number of a buffer of the call and bytes from its start."""

    kernel: Kernel
    grid: tuple[int, ...]
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Chain:
    """Kernels that are launched one after the other."""

    launches: tuple[Launch, ...]

    def __post_init__(self) -> None:
        for kernel in {launch.kernel for launch in self.launches}:
            if "griddepcontrol.wait" not in kernel.ir:
                raise ValueError(f"{kernel.name} does not wait for the kernels in front of it")

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()


@dataclass(frozen=True)
class Binary:
    """A compiled kernel, and the shared memory that its launch asks for."""

    code: bytes
    shared_bytes: int


_announced: dict[str, Chain] = {}
_binaries: dict[Kernel, Future[Binary]] = {}
_lock = Lock()


def announce(chain: Chain) -> str:
    """Make a chain known to the handler, which finds it by the key that this returns, and begin to compile it."""
    _register()
    with _lock:
        _announced[chain.digest] = chain
        for kernel in {launch.kernel for launch in chain.launches} - _binaries.keys():
            _binaries[kernel] = _compilers().submit(compiled, kernel)
    return chain.digest


@cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="triton")


@cache
def _register() -> None:
    stages: dict[str, Callable[[xla_ffi.Call], None]] = {
        "instantiate": _instantiate, "initialize": _initialize, "execute": _execute,
    }  # fmt: skip
    xla_ffi.register(TARGET_NAME, stages, platform="CUDA")


def _instantiate(call: xla_ffi.Call) -> None:
    for launch in _announced[call.attributes["chain"]].launches:
        _binaries[launch.kernel].result()


def _initialize(call: xla_ffi.Call) -> None:
    """Not while a graph is recorded, when nothing may be loaded."""
    _sequence(call.attributes["chain"], call.device)


def _execute(call: xla_ffi.Call) -> None:
    _sequence(call.attributes["chain"], call.device).launch(call.stream, call.addresses())


_sequences: dict[tuple[str, int], LaunchSequence] = {}
_functions: dict[tuple[Kernel, int], Function] = {}


def _sequence(key: str, device: int) -> LaunchSequence:
    with _lock:
        if (key, device) not in _sequences:
            chain = _announced[key]
            for kernel in {launch.kernel for launch in chain.launches}:
                if (kernel, device) not in _functions:
                    binary = _binaries[kernel].result()
                    _functions[kernel, device] = cuda_driver.load(
                        binary.code,
                        kernel.name,
                        device,
                        threads=kernel.num_warps * 32,
                        shared_bytes=binary.shared_bytes,
                    )
            _sequences[key, device] = LaunchSequence(
                device,
                [
                    (_functions[launch.kernel, device], launch.grid, [*launch.places, *[None] * HIDDEN_POINTERS])
                    for launch in chain.launches
                ],
            )
        return _sequences[key, device]


def compiled(kernel: Kernel) -> Binary:
    """For Hopper; from disk, if an earlier process compiled the same."""
    key = (triton.__version__, TARGET, kernel)
    sources = [Path(__file__), Path(triton_call.__file__)]
    content = kept(f"{kernel.name}-cubin", key, sources, lambda: _compile(kernel))
    return Binary(content[4:], int.from_bytes(content[:4], "little"))


def _compile(kernel: Kernel) -> bytes:
    """Shared memory in four bytes, then the code."""
    modules, metadata = stages(kernel, "cubin")
    assert metadata["global_scratch_size"] == 0, "no memory is given for it"
    # Were there more, the driver would read beyond those that it is given.
    pointers = find_parameters(kernel.ir)[1].count("!tt.ptr") + HIDDEN_POINTERS
    assert len(re.findall(r"\.param \.u64", modules["ptx"])) == pointers, "this Triton has other hidden parameters"
    shared_bytes: int = metadata["shared"]
    code: bytes = modules["cubin"]
    return shared_bytes.to_bytes(4, "little") + code


def stages(kernel: Kernel, last: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What Triton's compiler makes of the IR, from "ttgir" over "ptx" to the stage called ``last``, and what it says of
    the kernel."""
    backend, options, context = compiler(kernel.num_warps, kernel.num_stages)
    with tempfile.NamedTemporaryFile("w", suffix=".ttir") as file:
        file.write(kernel.ir)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    module.context = context
    metadata = {"target": TARGET, **vars(options)}
    passes: dict[str, Any] = {}
    backend.add_stages(passes, options, Language.GLUON if kernel.is_gluon else Language.TRITON)
    names = list(passes)
    made: dict[str, Any] = {}
    for name in names[names.index("ttgir") : names.index(last) + 1]:
        module = made[name] = passes[name](module, metadata)
    return made, metadata
