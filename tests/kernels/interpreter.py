"""Runs Triton kernels on NumPy arrays, with neither GPU nor torch.

Triton's interpreter (TRITON_INTERPRET=1, set before triton is imported) asks its arguments what it would ask a torch
tensor; ``Argument`` answers from an array. There is no bfloat16 in NumPy: use float32 or float16.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class Argument:
    """An array as a kernel's argument; ``array`` holds what the kernel wrote."""

    device = "cpu"

    def __init__(self, array: np.ndarray) -> None:
        self.array = np.ascontiguousarray(array)

    @property
    def dtype(self) -> str:
        return str(self.array.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return self.array.itemsize

    def is_contiguous(self) -> bool:
        return True

    # The interpreter copies arguments to the host and the results back; here both are the same memory.

    def cpu(self) -> Argument:
        return self

    def to(self, *_: Any, **__: Any) -> Argument:
        return self

    def clone(self) -> Argument:
        return Argument(self.array.copy())

    def copy_(self, other: Argument) -> Argument:
        if other is not self:
            self.array[...] = other.array
        return self

    def untyped_storage(self) -> Argument:
        return self

    def storage_offset(self) -> int:
        return 0

    def size(self) -> int:
        return self.array.nbytes

    def new_empty(self, *_: Any, **__: Any) -> Argument:
        return Argument(self.array.reshape(-1)[:0].copy())

    def set_(self, storage: Argument, *_: Any) -> Argument:
        self.array = storage.array
        return self
