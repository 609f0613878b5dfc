"""Reading safetensors checkpoints: single or sharded, strictly what the model needs."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxserve.models.config import CheckpointError

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
FLOAT_DTYPES = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32}
# Buffers that some trainers save and that the model computes itself.
DERIVED = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")


class Checkpoint:
    """The tensors of a model directory, read on demand as NumPy arrays of one dtype.

    Only files that the index names are opened, or model.safetensors where there is no index. Raises
    ``CheckpointError`` naming a missing file or tensor, or one of the wrong shape or kind.
    """

    def __init__(self, directory: Path, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._files = {path.name: _File(path) for path in _files(directory)}
        self._where = _weight_map(directory, self._files)
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def get(self, name: str, *shape: int) -> np.ndarray:
        """The tensor ``name``, which must have ``shape``, in this checkpoint's dtype."""
        if name not in self._where:
            raise CheckpointError(f"tensor {name} is missing from the checkpoint")
        file = self._files[self._where[name]]
        header = file.header[name]
        if tuple(header["shape"]) != shape:
            raise CheckpointError(f"tensor {name} has shape {tuple(header['shape'])}, expected {shape}")
        if header["dtype"] not in FLOAT_DTYPES:
            raise CheckpointError(f"tensor {name} has dtype {header['dtype']}, which is not supported")
        self._read.add(name)
        return _cast(file.tensor(name), self.dtype)

    def check_all_read(self) -> None:
        """Raises ``CheckpointError`` if there are tensors that nobody asked for."""
        left = [n for n in self._where if n not in self._read and not n.endswith(DERIVED)]
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise CheckpointError(f"the checkpoint has unknown tensors: {', '.join(sorted(left)[:3])}{more}")


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if index.exists():
        names = sorted(set(_read_index(index).values()))
        missing = [n for n in names if not (directory / n).is_file()]
        if missing:
            raise CheckpointError(
                f"{len(missing)} of the {len(names)} shards that {INDEX} names are missing, the first is {missing[0]}"
            )
        return [directory / n for n in names]
    single = directory / "model.safetensors"
    if not single.is_file():
        raise CheckpointError(f"{directory} has neither model.safetensors nor {INDEX}")
    return [single]


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if all(isinstance(v, str) and Path(v).name == v for v in weight_map.values()):
            return dict(weight_map)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    raise CheckpointError(f"{path} is not a safetensors index")


def _weight_map(directory: Path, files: dict[str, _File]) -> dict[str, str]:
    """Tensor name -> file name. The index decides where a name stands in several shards."""
    if not (directory / INDEX).exists():
        [(file_name, file)] = files.items()
        return dict.fromkeys(file.header, file_name)
    weight_map = _read_index(directory / INDEX)
    held = {file_name: file.header.keys() for file_name, file in files.items()}
    for name, file_name in weight_map.items():
        if name not in held[file_name]:
            raise CheckpointError(f"{INDEX} says that {file_name} holds {name}, but it does not")
    stray = set().union(*held.values()) - weight_map.keys()
    if stray:
        raise CheckpointError(f"{INDEX} does not name {min(stray)}, which a shard holds")
    return weight_map


class _File:
    """A safetensors file, mapped into memory: safetensors' own reader would copy each tensor, and keep all other Python
    threads waiting meanwhile. The format: eight bytes with the length of a header in JSON, the header, the data."""

    def __init__(self, path: Path) -> None:
        try:
            with safe_open(path, framework="numpy"):
                pass  # the library checks the header, and that the file holds what it says
            self._bytes = np.memmap(path, np.uint8, "r").view(np.ndarray)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from None
        self._start = 8 + int.from_bytes(self._bytes[:8].tobytes(), "little")
        self.header: dict[str, Any] = json.loads(self._bytes[8 : self._start].tobytes())
        self.header.pop("__metadata__", None)

    def tensor(self, name: str) -> np.ndarray:
        """One of a dtype that NumPy has, as it lies in the file."""
        header = self.header[name]
        first, last = (self._start + offset for offset in header["data_offsets"])
        array = self._bytes[first:last].view(FLOAT_DTYPES[header["dtype"]]).reshape(header["shape"])
        return array if array.flags.aligned else array.copy()


def _cast(array: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    if array.dtype == ml_dtypes.bfloat16 and dtype == np.float32:
        # bfloat16 is the upper half of a float32; several times faster than the element-wise cast.
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(dtype, copy=False)
