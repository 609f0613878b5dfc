"""How Triton kernels stand in programs for a GPU, seen without one."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="Triton is for Linux only")

from pallas_kernels import triton_call, triton_norm, triton_rope

pytestmark = pytest.mark.filterwarnings("ignore:AnnAssign:DeprecationWarning")  # Triton's front end, Python 3.13

ROPE = dict(qkv=(1, 5, 2, 6, 64), cos=(5, 32), sin=(5, 32), k_cache=(9, 16, 2, 64), v_cache=(9, 16, 2, 64), slots=(5,))


def lowered(function, *shapes: jax.ShapeDtypeStruct) -> str:
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def add_rms_norm() -> str:
    row, parts = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((3, 256), (2, 3, 256)))
    weight = jax.ShapeDtypeStruct((256,), jnp.bfloat16)
    return lowered(lambda *operands: triton_norm.add_rms_norm(*operands, eps=1e-5), row, parts, weight)


def rope_and_write() -> str:
    types = {name: jnp.float32 if name in ("cos", "sin", "qkv") else jnp.bfloat16 for name in ROPE} | {
        "slots": np.int32
    }
    shapes = [jax.ShapeDtypeStruct(shape, types[name]) for name, shape in ROPE.items()]
    return lowered(lambda *operands: triton_rope.rope_and_write(*operands, dtype=jnp.bfloat16), *shapes)


def test_a_kernel_is_xlas_own_custom_call_with_its_ir():
    text = add_rms_norm()
    [call] = re.findall(r"stablehlo.custom_call @\"?__gpu\$xla.gpu.triton.*", text)
    assert "tt.func public @add_rms_norm_kernel" in call and 'name = "add_rms_norm_kernel"' in call
    assert "grid_x = 3 : i32" in call and "grid_y = 1 : i32" in call and "tt.call" not in call


def test_what_is_changed_in_place_is_operand_and_result():
    text = rope_and_write()
    [call] = re.findall(r"stablehlo.custom_call @\"?__gpu\$xla.gpu.triton.*", text)
    pairs = re.findall(r"output_tuple_indices = \[(\d)\], operand_index = (\d)", call)
    assert pairs == [("1", "4"), ("2", "5")], "both caches, after q"
    assert re.search(r"%again4: !tt.ptr<bf16>[^,]*, %again5: !tt.ptr<bf16>", call)


def test_the_ir_is_made_once_a_machine(cache, monkeypatch):
    first = add_rms_norm()
    [path] = (cache / "kernels").iterdir()
    assert path.name.startswith("add_rms_norm_kernel-")
    triton_call._triton_ir.cache_clear()
    monkeypatch.setattr(triton_call, "_make_ir", lambda *key: pytest.fail("made again"))
    assert add_rms_norm() == first


def test_other_constants_are_another_kernel(cache):
    names = ("x_ptr", "delta_ptr", "weight_ptr", "sum_ptr", "norm_ptr")
    types = tuple((name, "*bf16") for name in names)
    kernel, constants = triton_norm.add_rms_norm_kernel, (("EPS", 1e-5), ("WIDTH", 256), ("WIDTH_PAD", 256))
    one, two = (triton_call._triton_ir(kernel, types, (*constants, ("PARTS", parts)), (), 4, 3) for parts in (1, 2))
    assert one != two and len(list((cache / "kernels").iterdir())) == 2
