"""Safetensors files as writers may make them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxserve.models.config import CheckpointError
from jaxserve.models.weights import Checkpoint

FLOAT32, BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


def write(directory: Path, tensors: dict[str, np.ndarray], padding: int, metadata: Any = None) -> None:
    """By hand: the format says nothing of where a header ends."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    at = 0
    for name, array in tensors.items():
        kind = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64"}[str(array.dtype)]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (padding - len(text) % 8)
    data = b"".join(array.tobytes() for array in tensors.values())
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("padding", [8, 9, 11])
def test_tensors_are_read_wherever_they_begin(tmp_path: Path, padding: int):
    rng = np.random.default_rng(0)
    tensors = {
        "wide": rng.standard_normal((3, 5)).astype(np.float32),
        "odd": rng.standard_normal(3).astype(np.float16),
        "half": rng.standard_normal((2, 7)).astype(ml_dtypes.bfloat16),
        "empty": np.zeros((0, 4), np.float32),
    }
    write(tmp_path, tensors, padding, {"format": "pt"})
    for dtype in (FLOAT32, BFLOAT16):
        checkpoint = Checkpoint(tmp_path, dtype)
        for name, array in tensors.items():
            got = checkpoint.get(name, *array.shape)
            assert got.dtype == dtype and got.flags.aligned
            np.testing.assert_array_equal(got, array.astype(dtype))
        checkpoint.check_all_read()


def test_what_a_file_says_wrongly_is_named(tmp_path: Path):
    write(tmp_path, {"ids": np.arange(4), "norm": np.ones(4, np.float32)}, 8)
    checkpoint = Checkpoint(tmp_path, FLOAT32)
    with pytest.raises(CheckpointError, match="tensor ids has dtype I64, which is not supported"):
        checkpoint.get("ids", 4)
    with pytest.raises(CheckpointError, match=r"tensor norm has shape \(4,\), expected \(5,\)"):
        checkpoint.get("norm", 5)
    with pytest.raises(CheckpointError, match="unknown tensors: ids, norm"):
        checkpoint.check_all_read()
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="is not a readable safetensors file"):
        Checkpoint(tmp_path, FLOAT32)
