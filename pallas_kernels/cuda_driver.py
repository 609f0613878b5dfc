"""The few calls of CUDA's driver interface that launching kernels takes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_int, c_uint, c_void_p
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any

import numpy as np

MAX_DYNAMIC_SHARED_SIZE_BYTES, PREFER_SHARED, PROGRAMMATIC_STREAM_SERIALIZATION = 8, 1, 6
UNASKED_SHARED_BYTES = 48 << 10
"""More must be asked for."""


class _Attribute(Structure):
    _fields_ = (("id", c_int), ("pad", c_char * 4), ("value", c_int), ("rest", c_char * 60))


class _Config(Structure):
    _fields_ = (
        ("grid", c_uint * 3), ("block", c_uint * 3), ("shared_bytes", c_uint), ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)), ("num_attributes", c_uint),
    )  # fmt: skip


@cache
def _library() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        text = c_char_p()
        _library().cuGetErrorString(status, byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'error %d' % status).decode()}")


@cache
def _context(device: int) -> c_void_p:
    """The one that XLA uses as well."""
    handle, context = c_int(), c_void_p()
    _call("cuInit", 0)
    _call("cuDeviceGet", byref(handle), device)
    _call("cuDevicePrimaryCtxRetain", byref(context), handle)
    return context


@contextmanager
def _current(device: int) -> Iterator[None]:
    _call("cuCtxPushCurrent_v2", _context(device))
    try:
        yield
    finally:
        _call("cuCtxPopCurrent_v2", byref(c_void_p()))


@dataclass(frozen=True)
class Function:
    """A kernel that is loaded on a device, how many threads a program has, and how much shared memory."""

    handle: int
    threads: int
    shared_bytes: int


def load(code: bytes, name: str, device: int, *, threads: int, shared_bytes: int) -> Function:
    """The kernel ``name`` of a binary, for the life of the process; ``RuntimeError`` says what the driver refuses."""
    module, handle = c_void_p(), c_void_p()
    with _current(device):
        _call("cuModuleLoadData", byref(module), code)
        _call("cuModuleGetFunction", byref(handle), module, name.encode())
        if shared_bytes > UNASKED_SHARED_BYTES:
            _call("cuFuncSetCacheConfig", handle, PREFER_SHARED)
            _call("cuFuncSetAttribute", handle, MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
    assert handle.value is not None
    return Function(handle.value, threads, shared_bytes)


class LaunchSequence:
    """Launches of kernels whose parameters are pointers into given buffers; each but the first may start before the one
    in front has ended. A pointer is (number of the buffer, bytes from its start), or None for null."""

    def __init__(
        self, device: int, launches: Sequence[tuple[Function, Sequence[int], Sequence[tuple[int, int] | None]]]
    ) -> None:
        self._device = device
        self._lock = Lock()
        early = _Attribute(id=PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        pointers = [place or (-1, 0) for _, _, places in launches for place in places]
        self._numbers = np.array([number for number, _ in pointers])
        self._offsets = np.array([offset for _, offset in pointers], np.uint64)
        self._values = np.zeros(len(pointers), np.uint64)
        # The driver takes, for each launch, an array of addresses at which the parameters stand.
        self._addresses = self._values.ctypes.data + 8 * np.arange(len(pointers), dtype=np.uint64)
        self._launches = []
        start = 0
        for number, (function, grid, places) in enumerate(launches):
            config = _Config(
                (c_uint * 3)(*grid), (c_uint * 3)(function.threads, 1, 1), function.shared_bytes, None,
                ctypes.pointer(early), 1 if number else 0,
            )  # fmt: skip
            parameters = c_void_p(self._addresses.ctypes.data + 8 * start)
            self._launches.append((config, c_void_p(function.handle), parameters))
            start += len(places)

    def launch(self, stream: int, buffers: Sequence[int]) -> None:
        """Enqueue all, or record them in the graph that ``stream`` captures; ``buffers`` are addresses."""
        with self._lock, _current(self._device):
            np.add(np.array([*buffers, 0], np.uint64)[self._numbers], self._offsets, out=self._values)
            for config, function, parameters in self._launches:
                config.stream = stream
                _call("cuLaunchKernelEx", byref(config), function, parameters, None)
