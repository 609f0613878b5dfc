"""Triton kernels in XLA programs: Triton's front end, and XLA for the rest.

XLA has a custom call whose kernel is given in Triton's IR. Such kernels are plain nodes of a program's CUDA graph and
may be on the multiprocessors before the kernel in front of them has ended (programmatic dependent launch), and XLA
compiles them, on all cores and outside Python's lock. jax-triton compiles in Python, and each of its kernels is a graph
of its own within the graph; JAXSERVE_TRITON=jax_triton in the environment chooses it, to compare. Decode steps
and sampling go further: see ``triton_chain``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import triton
from jax.ref import AbstractRef
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import type_canonicalisation_dict

from pallas_kernels.kept import kept

TARGET = GPUTarget("cuda", 90, 32)
"""What the front end checks the language for, and chains of kernels (``triton_chain``) are compiled for."""
TARGET_NAME = "__gpu$xla.gpu.triton"
_chaining = ContextVar("chaining", default=False)


@contextmanager
def chaining() -> Iterator[None]:
    """Within, kernels are for a chain: their parameter CHAINED, if they have it, is true. A function that is jitted by
    itself must not be traced here and elsewhere with the same arguments, or JAX takes the one for the other."""
    token = _chaining.set(True)
    try:
        yield
    finally:
        _chaining.reset(token)


def is_chaining() -> bool:
    """Whether kernels are for a chain."""
    return _chaining.get()


def triton_call(
    *operands: Any,
    kernel: Any,
    grid: tuple[int, ...],
    out_type: Any,
    num_warps: int = 4,
    num_stages: int = 3,
    **parameters: Any,
) -> Any:
    """Run ``kernel`` on arrays, of which it reads, ``jax.Ref``s, which it may change, and ints, which are compiled in;
    returns arrays like ``out_type``, one ShapeDtypeStruct or several. The kernel's parameters are the operands, the
    results, and those given by name."""
    if any(p.name == "CHAINED" for p in kernel.params):
        parameters["CHAINED"] = is_chaining()
    if os.environ.get("JAXSERVE_TRITON") == "jax_triton":
        import jax_triton

        return jax_triton.triton_call(
            *operands, kernel=kernel, grid=grid, out_type=out_type, num_warps=num_warps, num_stages=num_stages,
            **parameters,
        )  # fmt: skip
    results = list(out_type) if isinstance(out_type, Sequence) else [out_type]
    names = [p.name for p in kernel.params if p.name not in parameters]
    values = dict(zip(names, [*operands, *results], strict=True))
    constants = {n: v for n, v in values.items() if isinstance(v, int)} | parameters
    types = {n: _pointer_to(v.dtype) for n, v in values.items() if n not in constants}
    refs = {n: v for n, v in values.items() if n in types and isinstance(jax.typeof(v), AbstractRef)}
    arrays = {n: refs[n][...] if n in refs else values[n] for n in types if n not in names[len(operands) :]}
    changed = [jax.ShapeDtypeStruct(arrays[n].shape, arrays[n].dtype) for n in refs]
    module = _triton_ir(kernel, tuple(types.items()), tuple(constants.items()), tuple(refs), num_warps, num_stages)
    got = jax.ffi.ffi_call(
        TARGET_NAME,
        [*results, *changed],
        input_output_aliases={list(arrays).index(n): len(results) + i for i, n in enumerate(refs)},
    )(
        *arrays.values(),
        name=kernel.__name__, ir=module, debug=False, num_warps=np.int32(num_warps), num_stages=np.int32(num_stages),
        **{f"grid_{axis}": np.int32(size) for axis, size in zip("xyz", (*grid, 1, 1), strict=False)},
    )  # fmt: skip
    for ref, value in zip(refs.values(), got[len(results) :], strict=True):
        ref[...] = value
    return got[: len(results)] if isinstance(out_type, Sequence) else got[0]


def _pointer_to(dtype: Any) -> str:
    return "*" + str(type_canonicalisation_dict[str(dtype)])


@cache
def _triton_ir(kernel: Any, *how: Any) -> str:
    """``_make_ir``, once a machine."""
    key = (triton.__version__, kernel.cache_key, *how)
    return kept(kernel.__name__, key, [Path(__file__)], lambda: _make_ir(kernel, *how).encode()).decode()


def _make_ir(
    kernel: Any,
    types: tuple[tuple[str, str], ...],
    constants: tuple[tuple[str, Any], ...],
    in_place: tuple[str, ...],
    num_warps: int,
    num_stages: int,
) -> str:
    """The module of a kernel with these types and constants of its parameters, as text."""
    backend, options, context = compiler(num_warps, num_stages)
    places = {p.name: i for i, p in enumerate(kernel.params)}
    signature = {name: dict(types).get(name, "constexpr") for name in places}
    aligned = {(places[name],): [["tt.divisibility", 16]] for name, _ in types}  # XLA's buffers are
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind(kernel, signature, {(places[n],): v for n, v in constants}, aligned)
    module = source.make_ir(
        TARGET, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    if not kernel.is_gluon():
        module = backend.make_ttir(module, {}, options, TARGET.arch)  # inlines: XLA takes no calls within reductions
    return _with_aliases(module.str_nodebug(), [[n for n, _ in types].index(n) for n in in_place])


def compiler(num_warps: int, num_stages: int) -> tuple[Any, Any, Any]:
    """Triton's compiler, its options, and a context for its IR."""
    backend = triton.compiler.make_backend(TARGET)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    return backend, backend.parse_options({"num_warps": num_warps, "num_stages": num_stages}), context


def find_parameters(module: str) -> re.Match[str]:
    """Where a module's text declares the kernel's parameters: group 1."""
    found = re.search(r"tt\.func public @\w+\((.*)\) attributes", module)
    assert found is not None
    return found


def _with_aliases(module: str, in_place: list[int]) -> str:
    """XLA passes buffers that are changed in place twice, as operands and as results; the kernel needs them once."""
    header = find_parameters(module)
    declared = re.findall(r"%\w+: (!tt\.ptr<\w+>(?: \{[^}]*\})?)", header[1])
    again = [f"%again{i}: {declared[i]}" for i in in_place]
    return module[: header.start(1)] + ", ".join([header[1], *again]) + module[header.end(1) :]
