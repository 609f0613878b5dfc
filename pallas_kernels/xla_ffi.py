"""Handlers of XLA's custom calls, written in Python.

XLA calls a handler by a C interface (``xla/ffi/api/c_api.h`` in ``jax.ffi.include_dir()``), which ctypes can speak: the
structures below are the part of it that is needed. Where a program is a CUDA graph, a handler runs when the graph is
recorded and not at every step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass
from typing import Any

import jax

VERSION = (0, 4)
"""Of the interface: what the structures are like."""
METADATA, COMMAND_BUFFER_COMPATIBLE, STRING_ATTRIBUTE, INTERNAL_ERROR = 1, 1, 4, 13


class _Extension(Structure):
    _fields_ = (("struct_size", c_size_t), ("type", c_int32), ("next", c_void_p))


class _Version(Structure):
    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("major", c_int32), ("minor", c_int32))


class _Metadata(Structure):
    _fields_ = (("struct_size", c_size_t), ("version", _Version), ("traits", c_uint32), ("state_type", c_int64))


class _MetadataExtension(Structure):
    _fields_ = (("base", _Extension), ("metadata", POINTER(_Metadata)))


class _Buffer(Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("dtype", c_int32), ("data", c_void_p), ("rank", c_int64),
        ("dims", POINTER(c_int64)),
    )  # fmt: skip


class _Buffers(Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("size", c_int64), ("types", c_void_p),
        ("buffers", POINTER(POINTER(_Buffer))),
    )  # fmt: skip


class _Span(Structure):
    _fields_ = (("start", c_void_p), ("size", c_size_t))

    def text(self) -> str:
        return ctypes.string_at(self.start, self.size).decode()


class _Attributes(Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("size", c_int64), ("types", POINTER(c_int32)),
        ("names", POINTER(POINTER(_Span))), ("values", POINTER(c_void_p)),
    )  # fmt: skip


class _ErrorArguments(Structure):
    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("message", c_char_p), ("code", c_int32))


class _StreamArguments(Structure):
    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("context", c_void_p), ("stream", c_void_p))


class _DeviceArguments(Structure):
    _fields_ = (("struct_size", c_size_t), ("extension", c_void_p), ("context", c_void_p), ("device", c_int32))


_Function = ctypes.CFUNCTYPE(c_void_p, c_void_p)


class _Api(Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", c_void_p), ("version", _Version), ("internal", c_void_p),
        *(
            (name, _Function)
            for name in (
                "error_create", "error_details", "error_destroy", "handler_register", "stream_get", "type_register",
                "context_get", "state_set", "state_get", "memory_allocate", "memory_free", "schedule", "num_threads",
                "future_create", "future_available", "future_error", "run_id", "device_ordinal",
            )
        ),
    )  # fmt: skip


class _CallFrame(Structure):
    _fields_ = (
        ("struct_size", c_size_t), ("extension", POINTER(_Extension)), ("api", POINTER(_Api)), ("context", c_void_p),
        ("stage", c_int32), ("arguments", _Buffers), ("results", _Buffers), ("attributes", _Attributes),
        ("future", c_void_p),
    )  # fmt: skip


@dataclass(frozen=True)
class Call:
    """What a handler is called with."""

    frame: Any

    @property
    def attributes(self) -> dict[str, str]:
        """Those that are strings."""
        attributes = self.frame.attributes
        return {
            attributes.names[i][0].text(): _Span.from_address(attributes.values[i]).text()
            for i in range(attributes.size)
            if attributes.types[i] == STRING_ATTRIBUTE
        }

    def addresses(self) -> list[int]:
        """Of the buffers, operands first and then results, in the device's memory; 0 of empty ones."""
        return [
            group.buffers[i][0].data or 0
            for group in (self.frame.arguments, self.frame.results)
            for i in range(group.size)
        ]

    @property
    def stream(self) -> int:
        """The CUDA stream to enqueue on."""
        return int(self._ask("stream_get", _StreamArguments).stream or 0)

    @property
    def device(self) -> int:
        """The device's number in this process."""
        return int(self._ask("device_ordinal", _DeviceArguments).device)

    def _ask(self, function: str, kind: Any) -> Any:
        asked = kind(struct_size=ctypes.sizeof(kind), context=self.frame.context)
        if getattr(self.frame.api[0], function)(ctypes.addressof(asked)):
            raise RuntimeError(f"XLA does not answer {function}")
        return asked


_handlers: list[Any] = []
"""C code holds no references."""


def register(target: str, stages: Mapping[str, Callable[[Call], None]], *, platform: str) -> None:
    """Make a custom call's target known: ``stages``, "instantiate", "initialize" and "execute", are called when a
    program is made ready, before it runs, and to run or to record it. What they raise is the program's error."""
    capsules = {}
    for stage, run in stages.items():
        _handlers.append(_Function(_c_handler(run)))
        capsules[stage] = jax.ffi.pycapsule(ctypes.cast(_handlers[-1], c_void_p).value)
    jax.ffi.register_ffi_target(target, capsules, platform=platform)


def _c_handler(run: Callable[[Call], None]) -> Callable[[int], int | None]:
    def handle(address: int) -> int | None:
        frame = _CallFrame.from_address(address)
        try:
            if frame.extension and frame.extension[0].type == METADATA:
                _describe(_MetadataExtension.from_address(ctypes.addressof(frame.extension[0])).metadata[0])
            else:
                run(Call(frame))
        except BaseException as error:  # nothing may pass through C, an interrupt neither
            return _error(frame, f"{type(error).__name__}: {error}")
        return None

    return handle


def _describe(metadata: Any) -> None:
    """XLA asks first which version of the interface a handler speaks, and whether a graph may replay what it did."""
    metadata.version.major, metadata.version.minor = VERSION
    metadata.traits = COMMAND_BUFFER_COMPATIBLE
    metadata.state_type = 0


def _error(frame: Any, message: str) -> int | None:
    text = message.encode()
    arguments = _ErrorArguments(struct_size=ctypes.sizeof(_ErrorArguments), message=text, code=INTERNAL_ERROR)
    result: int | None = frame.api[0].error_create(ctypes.addressof(arguments))
    return result
