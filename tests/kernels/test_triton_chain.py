"""Chains of kernels without a GPU: what is launched, in which memory, and that no kernel touches anything too early.

The custom call is XLA's own, on the CPU; in the place of kernels stand functions that do the same in NumPy.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

pytest.importorskip("triton", reason="Triton is for Linux only")

import triton
import triton.language as tl

from bench.shapes import LLAMA_8B
from jaxserve.models import llama
from jaxserve.models.attention import AttentionInputs, AttentionSpec
from jaxserve.models.dummy import param_structs
from pallas_kernels import chained, triton_launch, xla_ffi
from pallas_kernels.triton_call import triton_call
from pallas_kernels.triton_early import enter

pytestmark = pytest.mark.filterwarnings("ignore:AnnAssign:DeprecationWarning")  # Triton's front end, Python 3.13

SIZE = 8


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr, CHAINED: tl.constexpr = False):
    if CHAINED:
        enter()
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.load(x_ptr + at) + tl.load(y_ptr + at))


@triton.jit
def double_kernel(x_ptr, before_ptr, SIZE: tl.constexpr, CHAINED: tl.constexpr = False):
    if CHAINED:
        enter()
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + at)
    tl.store(before_ptr + at, x)
    tl.store(x_ptr + at, 2 * x)


@triton.jit
def hasty_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.load(x_ptr + at))


VECTOR = jax.ShapeDtypeStruct((SIZE,), jnp.float32)


def add(x: jax.Array, y: jax.Array) -> jax.Array:
    return triton_call(x, y, kernel=add_kernel, grid=(1,), out_type=VECTOR, SIZE=SIZE)


def double(ref: jax.Array) -> jax.Array:
    """Doubles a ``jax.Ref``, and returns what it held."""
    return triton_call(ref, kernel=double_kernel, grid=(1,), out_type=VECTOR, SIZE=SIZE)


def vector(address: int) -> np.ndarray:
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (SIZE,))


def numpy_add(x: int, y: int, out: int) -> None:
    vector(out)[:] = vector(x) + vector(y)


def numpy_double(x: int, before: int, again: int) -> None:
    assert again == x
    vector(before)[:] = vector(x)
    vector(x)[:] *= 2


NUMPY: dict[str, Callable[..., None]] = {"add_kernel": numpy_add, "double_kernel": numpy_double}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Chains run on the CPU; yields the names of the kernels that ran."""
    ran: list[str] = []

    def execute(call: xla_ffi.Call) -> None:
        buffers = call.addresses()
        for launch in triton_launch._announced[call.attributes["chain"]].launches:
            NUMPY[launch.kernel.name](*(buffers[number] + offset for number, offset in launch.places))
            ran.append(launch.kernel.name)

    def announce(chain: triton_launch.Chain) -> str:
        triton_launch._announced[chain.digest] = chain
        return chain.digest

    monkeypatch.setattr(triton_launch, "announce", announce)
    monkeypatch.setattr(triton_launch, "TARGET_NAME", f"chain_{id(ran)}")
    xla_ffi.register(f"chain_{id(ran)}", {"execute": execute}, platform="cpu")
    yield ran


X, Y = np.arange(SIZE, dtype=np.float32), np.ones(SIZE, np.float32)


def test_kernels_run_in_order_on_each_others_results(on_cpu: list[str]):
    def function(x, y):
        total = add(x, y).reshape(2, SIZE // 2)
        for _ in range(3):
            total = add(total.reshape(SIZE), y)
        return add(total, x).reshape(SIZE // 2, 2), {"y": y}

    got, unchanged = jax.jit(chained(function))(X, Y)
    np.testing.assert_array_equal(got, (2 * X + 4).reshape(SIZE // 2, 2))
    np.testing.assert_array_equal(unchanged["y"], Y)
    assert on_cpu == ["add_kernel"] * 5


def test_what_no_kernel_needs_any_more_makes_room(on_cpu: list[str]):
    def function(x, y):
        for _ in range(50):
            x = add(x, y)
        return x

    text = jax.jit(chained(function)).lower(X, Y).as_text()
    [scratch] = re.findall(r"tensor<(\d+)xui8>", text.splitlines()[-4])
    assert int(scratch) == 2 * 256, "one to read and one to write"
    np.testing.assert_array_equal(jax.jit(chained(function))(X, Y), X + 50)


def test_an_array_is_changed_in_place_and_the_callers_kept(on_cpu: list[str]):
    @jax.jit
    def in_layers(x, y):
        ref = jax.new_ref(x)
        first = double(ref)
        second = double(ref)
        return add(first, second), jax.freeze(ref), y

    x = jnp.array(X)
    total, changed, unchanged = jax.jit(chained(in_layers))(x, Y)
    np.testing.assert_array_equal(total, 3 * X)
    np.testing.assert_array_equal(changed, 4 * X)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(unchanged, Y)
    assert on_cpu == ["double_kernel", "double_kernel", "add_kernel"]


def test_literals_become_operands(on_cpu: list[str]):
    np.testing.assert_array_equal(jax.jit(chained(lambda x: add(x, np.full(SIZE, 7, np.float32))))(X), X + 7)


def test_what_cannot_be_chained_says_so():
    with pytest.raises(ValueError, match="cannot have mul in it"):
        jax.make_jaxpr(chained(lambda x: add(2 * x, x)))(X)

    def hasty(x):
        return triton_call(x, kernel=hasty_kernel, grid=(1,), out_type=VECTOR, SIZE=SIZE)

    with pytest.raises(ValueError, match="hasty_kernel does not wait"):
        jax.make_jaxpr(chained(hasty))(X)

    def stale(x):
        ref = jax.new_ref(x)
        double(ref)
        return add(x, jax.freeze(ref))

    with pytest.raises(ValueError, match="as it was before"):
        jax.make_jaxpr(chained(stale))(X)

    def part(x):
        return add(jax.new_ref(x)[1], x[0])

    with pytest.raises(ValueError, match="cannot take a part of an array"):
        jax.make_jaxpr(chained(part))(np.ones((2, SIZE), np.float32))

    def twice(x):
        return triton_call(jax.new_ref(x), x, kernel=add_kernel, grid=(1,), out_type=VECTOR, SIZE=SIZE)

    with pytest.raises(ValueError, match="reads by another name what it changes"):
        jax.make_jaxpr(chained(twice))(X)


def test_a_function_may_have_been_traced_without_a_chain(on_cpu: list[str]):
    jax.jit(twice_added).trace(X, Y)
    np.testing.assert_array_equal(jax.jit(chained(twice_added))(X, Y), X + 2)


def twice_added(x, y):
    return add(add(x, y), y)


def test_a_handlers_error_is_the_programs():
    def fail(call: xla_ffi.Call) -> None:
        raise LookupError(f"no {call.attributes['what']}")

    xla_ffi.register("failing", {"execute": fail}, platform="cpu")
    call = jax.ffi.ffi_call("failing", VECTOR)
    with pytest.raises(jax.errors.JaxRuntimeError, match="LookupError: no luck"):
        jax.jit(lambda x: call(x, what="luck"))(X)


@cache
def decode_chain(rows: int, layers: int = 2) -> triton_launch.Chain:
    """Of a decode step of the 8B shape."""
    config = LLAMA_8B(layers)
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    spec = AttentionSpec(mesh, "triton", "gluon", "triton", "triton", 128**-0.5)
    assert llama.can_be_chained(config, rows, jnp.dtype(jnp.bfloat16), spec)
    half, ints = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16), partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    params = param_structs(config, jnp.dtype(jnp.bfloat16), mesh)
    cache = ((half((64, 16, 8, 128)),) * 2,) * layers
    row, tables = ints((rows,)), ints((rows, 64))
    inputs = AttentionInputs(row, row, row, tables, row, row, ints((0, 64)), ints((0,)), ints((1,)))
    before = set(triton_launch._announced)
    forward = partial(llama.forward, config=config, spec=replace(spec, chained=True))
    jax.make_jaxpr(forward)(params, cache, ints((rows,)), inputs)
    [digest] = set(triton_launch._announced) - before
    return triton_launch._announced[digest]


INSTRUCTION = re.compile(r"(?:@!?%p\d+ )?([a-z][\w.:]*)\s+(.*);")


def parameters_used(text: str, known: dict[str, set[int]]) -> tuple[set[int], set[int]]:
    """Which of a kernel's parameters a stretch of PTX reads through and writes through, as pointers. ``known`` says of
    registers which parameters their values come from, and learns."""
    reads, writes = set(), set()
    for line in text.splitlines():
        if not (found := INSTRUCTION.match(line.strip())):
            continue
        name, operands = found[1], found[2]
        registers = re.findall(r"%r[sd]?\d+", operands)
        inside = [
            register for part in re.findall(r"\[([^\]]*)\]", operands) for register in re.findall(r"%r[sd]?\d+", part)
        ]
        through = set().union(*(known.get(register, set()) for register in inside))
        if name.startswith("ld.param"):
            known[registers[0]] = {int(re.search(r"_param_(\d+)", operands)[1])}
        elif name.startswith(("st.global", "red.global", "atom")):
            writes |= through
        elif name.startswith(("ld.global", "cp.async.c")):
            reads |= through
        elif registers and "[" not in operands:
            known[registers[0]] = set().union(*(known.get(register, set()) for register in registers[1:]))
    return reads, writes


WRITTEN_ELSEWHERE = {"decode_kernel": {1, 2}}
"""Parameters through which a kernel reads early what other kernels leave as it is: the keys and values of all but the
newest token (tests/gpu/test_chain.py). They are copied early, and the newest are loaded late."""


@pytest.mark.parametrize("rows", [1, 32, 64])
def test_kernels_of_a_decode_step_touch_nothing_too_early(rows: int):
    """In PTX: a program lets the next kernel come, reads nothing that a kernel of the chain writes, and writes nothing,
    before it has waited for those in front."""
    chain = decode_chain(rows)
    early, written = {}, set()
    kernels = {launch.kernel for launch in chain.launches}
    for kernel in kernels:
        modules, _ = triton_launch.stages(kernel, "ptx")
        before, wait, after = modules["ptx"].partition("griddepcontrol.wait;")
        assert wait and wait not in after
        assert "griddepcontrol.launch_dependents" in before
        known: dict[str, set[int]] = {}
        early[kernel], nothing = parameters_used(before, known)
        assert not nothing
        reads, writes = parameters_used(after, known)
        assert writes
        unchanged = WRITTEN_ELSEWHERE.get(kernel.name, set())
        assert unchanged <= reads
        assert not unchanged & parameters_used(re.sub(r".*cp\.async.*", "", before), {})[0]
        written |= {launch.places[n] for launch in chain.launches if launch.kernel == kernel for n in writes}
    assert {kernel.name for kernel in kernels if early[kernel]} == {kernel.name for kernel in kernels}
    for launch in chain.launches:
        unchanged = WRITTEN_ELSEWHERE.get(launch.kernel.name, set())
        assert not {launch.places[n] for n in early[launch.kernel] - unchanged} & written, launch.kernel.name


def test_a_binary_is_compiled_once_a_machine(cache, monkeypatch: pytest.MonkeyPatch):
    kernel = decode_chain(8).launches[0].kernel
    first = triton_launch.compiled(kernel)
    assert first.code.startswith(b"\x7fELF")
    monkeypatch.setattr(triton_launch, "_compile", lambda kernel: pytest.fail("compiled again"))
    assert triton_launch.compiled(kernel) == first
