"""Triton kernels in a row as one custom call, each on the multiprocessors before the one in front of it has ended.

A kernel of a decode step takes 2 to 60 us, and from the end of one to the first bytes of the next go two or three in
which memory is idle. With programmatic dependent launch (CUDA programming guide, "Programmatic Dependent Launch and
Synchronization") a kernel starts as soon as all programs of the one in front run and leave room, reads ahead what no
kernel of the chain writes (weights, and the keys and values of earlier tokens), and then waits (``enter``) until all
before it is done. XLA launches kernels so as well, but makes each wait at its very beginning; hence a handler of our
own (``triton_launch``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from pallas_kernels import triton_launch
from pallas_kernels.triton_call import TARGET_NAME, chaining
from pallas_kernels.triton_launch import Chain, Kernel, Launch

ALIGNMENT = 256
"""Bytes; of each array in the scratch memory."""


def chained(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, which may do nothing with arrays but give them to Triton kernels, change ``jax.Ref``s by these and
    reshape, as one custom call; ``ValueError`` says what else it does.

    What its kernels read before they wait must be an argument that none of them writes, or a part that none writes.
    """

    def run(*arguments: Any) -> Any:
        with chaining():
            fresh = partial(function)  # traced before, outside, it would have other kernels
            jaxpr, shapes = jax.make_jaxpr(fresh, return_shape=True)(*arguments)
        results = _call(_record(jaxpr), jax.tree.leaves(arguments))
        leaves, tree = jax.tree.flatten(shapes)
        return jax.tree.unflatten(tree, [r.reshape(like.shape) for r, like in zip(results, leaves, strict=True)])

    return run


@dataclass(eq=False)
class _Storage:
    """Memory of an array: of an operand, a result or between two kernels."""

    shape: tuple[int, ...]
    dtype: Any
    version: int = 0
    """How often it was changed in place."""
    first_use: int = -1
    last_use: int = -1

    @property
    def nbytes(self) -> int:
        size = int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class _Value:
    """An array as of a moment; reshaped ones share a storage."""

    storage: _Storage
    version: int

    def current(self) -> _Storage:
        if self.version != self.storage.version:
            raise ValueError("a chain of kernels needs an array as it was before a kernel changed it in place")
        return self.storage


@dataclass
class _Cell:
    """A ``jax.Ref``."""

    value: _Value


@dataclass
class _Recording:
    operands: list[_Value] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)
    """The last of the operands."""
    launches: list[tuple[Kernel, tuple[int, ...], list[_Storage]]] = field(default_factory=list)
    results: list[_Value] = field(default_factory=list)

    def run(self, jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        """Follow the equations with values in the place of arrays."""
        known = dict(zip(jaxpr.invars, arguments, strict=True))
        known |= {v: self._constant(c) for v, c in zip(jaxpr.constvars, constants, strict=True)}

        def read(atom: Any) -> Any:
            return self._constant(atom.val) if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            known |= zip(equation.outvars, self._step(equation, [read(v) for v in equation.invars]), strict=True)
        return [read(v) for v in jaxpr.outvars]

    def _step(self, equation: Any, inputs: list[Any]) -> list[Any]:
        match equation.primitive.name:
            case "jit" | "shard_map":
                inner = equation.params["jaxpr"]
                return self.run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), inputs)
            case "reshape" | "squeeze":
                return inputs[:1]
            case "new_ref":
                return [_Cell(inputs[0])]
            case "get" | "freeze" | "swap" if not _is_whole(equation.outvars[0].aval, inputs[0].value.storage):
                raise ValueError("a chain of kernels cannot take a part of an array")
            case "get" | "freeze":
                return [inputs[0].value]
            case "swap":
                before, inputs[0].value = inputs[0].value, inputs[1]
                return [before]
            case "ffi_call" if equation.params["target_name"] == TARGET_NAME:
                return self._launch(equation.params, inputs)
            case other:
                raise ValueError(f"a chain of kernels cannot have {other} in it")

    def _constant(self, array: Any) -> _Value:
        value = _Value(_Storage(np.shape(array), jnp.asarray(array).dtype), 0)
        self.operands.append(value)
        self.constants.append(array)
        return value

    def _launch(self, params: dict[str, Any], inputs: list[_Value]) -> list[_Value]:
        call = dict(params["attributes"])
        kernel = Kernel(call["name"], call["ir"], int(call["num_warps"]), int(call["num_stages"]))
        operands = [value.current() for value in inputs]
        changed = {result: operands[operand] for operand, result in params["input_output_aliases"]}
        for storage in changed.values():
            if operands.count(storage) > 1:
                raise ValueError(f"{kernel.name} reads by another name what it changes in place")
            storage.version += 1
        results = [
            changed.get(i) or _Storage(aval.shape, aval.dtype, first_use=len(self.launches))
            for i, aval in enumerate(params["result_avals"])
        ]
        for storage in (*operands, *results):
            storage.last_use = len(self.launches)
        self.launches.append((kernel, tuple(int(call[f"grid_{axis}"]) for axis in "xyz"), [*operands, *results]))
        return [_Value(storage, storage.version) for storage in results]


def _is_whole(aval: Any, storage: _Storage) -> bool:
    return int(np.prod(aval.shape)) == int(np.prod(storage.shape))


def _record(jaxpr: ClosedJaxpr) -> _Recording:
    recording = _Recording([_Value(_Storage(a.shape, a.dtype), 0) for a in jaxpr.in_avals])
    recording.results = recording.run(jaxpr.jaxpr, jaxpr.consts, list(recording.operands))
    return recording


def _call(recording: _Recording, arguments: Sequence[Any]) -> list[Any]:
    """The results of a recorded function, by one custom call."""
    given = zip(recording.operands, [*arguments, *map(jnp.asarray, recording.constants)], strict=True)
    arrays = {value.storage: array for value, array in given}
    operands = [storage for storage in arrays if storage.last_use >= 0]
    changed = [storage for storage in operands if storage.version]
    wanted = [value.current() for value in recording.results]
    made = [*changed, *dict.fromkeys(s for s in wanted if s not in arrays)]
    scratch, scratch_bytes = _share_scratch(recording, {*operands, *made})
    # A call's buffers are its operands, then its results, the last of which is scratch memory.
    places = {storage: (i, 0) for i, storage in enumerate([*operands, *made])}
    places |= {storage: (len(operands) + len(made), offset) for storage, offset in scratch.items()}
    chain = Chain(
        tuple(
            Launch(kernel, grid, tuple(places[storage] for storage in storages))
            for kernel, grid, storages in recording.launches
        )
    )
    results = jax.ffi.ffi_call(
        triton_launch.TARGET_NAME,
        [
            *(jax.ShapeDtypeStruct(storage.shape, storage.dtype) for storage in made),
            jax.ShapeDtypeStruct((scratch_bytes,), jnp.uint8),
        ],
        input_output_aliases={operands.index(storage): i for i, storage in enumerate(changed)},
    )(*(arrays[storage] for storage in operands), chain=triton_launch.announce(chain))
    found = arrays | dict(zip(made, results, strict=False))
    return [found[storage] for storage in wanted]


def _share_scratch(recording: _Recording, elsewhere: set[_Storage]) -> tuple[dict[_Storage, int], int]:
    """Where in the scratch memory the other arrays stand, and its size: an array takes the place of one as large that
    no kernel needs any more. Whoever writes it has waited for those that read that one."""
    offsets: dict[_Storage, int] = {}
    free: dict[int, list[int]] = {}
    end = 0
    for index, (_, _, storages) in enumerate(recording.launches):
        mine = dict.fromkeys(s for s in storages if s not in elsewhere)
        for storage in mine:
            if storage.first_use == index:
                if places := free.get(storage.nbytes):
                    offsets[storage] = places.pop()
                else:
                    offsets[storage], end = end, end + storage.nbytes
        for storage in mine:
            if storage.last_use == index:
                free.setdefault(storage.nbytes, []).append(offsets[storage])
    return offsets, end
