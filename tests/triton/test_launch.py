"""A launch is one object: in Triton's interpreter NumPy arrays give what torch's tensors give."""

import weakref

import keras
import pytest

if keras.config.backend() != "torch":
    pytest.skip("runs on torch", allow_module_level=True)

import torch
import triton

from keras_recurrent.backends.triton._device.common import INTERPRETED
from keras_recurrent.backends.triton._runtime import interpreter, torch_operators
from keras_recurrent.backends.triton._runtime.launch import (
    Launch,
    flat,
    like,
    map_arrays,
    next_power_of_2,
)
from tests.ops import cases, judge, small, token_wise

KERNELS = judge.kernels([*cases.DRAW, *token_wise.DRAW])
OPERATIONS = [operation for operation, implementation in KERNELS if implementation == "triton"]


@pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_launch_on_numpy_arrays_matches_torch(operation, monkeypatch):
    run, launches = torch_operators.run, []

    def record(launch):
        outputs = run(launch)
        launches.append((launch, outputs))
        return outputs

    monkeypatch.setattr(torch_operators, "run", record)
    fields = {"kinds": True, "state": True, "heads": (2, 1)} if operation in cases.DRAW else {}
    # In bfloat16, pairs of most chunks are not stored: they are arbitrary numbers.
    dtype = "float32" if operation == "gated_linear_attention" else "bfloat16"
    judge.run(operation, "triton", small.draw(operation, 21, dtype, "float32", **fields))
    assert len(launches) > 1
    for launch, outputs in launches:
        names = launch.kernel.arg_names
        numbers = len(launch.inputs) + len(launch.outputs) + len(launch.numbers)
        assert numbers <= len(names)
        given = [x for x in flat(launch.inputs) if x is not None]
        static = launch._replace(inputs=map_arrays(lambda x: x is not None, launch.inputs))
        found = iter(interpreter.run(static, *map(to_numpy, given)))
        for array, expected in zip(flat(launch.outputs), flat(outputs), strict=True):
            if array is None:
                assert expected is None
                continue
            result = next(found)
            assert result.dtype.name == array.dtype
            assert result.shape == tuple(expected.shape)
            result = torch.from_numpy(result.astype("float64"))
            torch.testing.assert_close(result, expected.double(), rtol=0, atol=0, equal_nan=True)


def to_numpy(tensor):
    if tensor.dtype != torch.bfloat16:
        return tensor.detach().numpy()
    bits = tensor.detach().view(torch.int16).numpy()
    return bits.view(interpreter.dtype("bfloat16"))


@pytest.mark.parametrize("in_place", [False, True])
def test_launch_update_writes_to_input_only_in_place(in_place):
    """The input itself if the launch is in place, else a copy of it."""

    class Kernel:
        def __getitem__(self, grid):
            return lambda given, updated: updated.add_(1)

    x = torch.zeros(2)
    updates = ((0, 0),)
    launch = Launch(Kernel(), 1, (x,), (like(x),), (), {}, updates, in_place)
    (updated,) = torch_operators.run(launch)
    assert (updated is x) == in_place
    assert updated.tolist() == [1, 1]
    assert x.tolist() == ([1, 1] if in_place else [0, 0])


def test_assembler_error_names_the_remedy():
    class Kernel:
        __name__ = "scan_kernel"

        def __getitem__(self, grid):
            raise triton.runtime.errors.PTXASError("ptxas fatal")

    launch = Launch(Kernel(), 1, (torch.zeros(1),), (), (), {})
    with pytest.raises(triton.runtime.errors.PTXASError) as caught:
        torch_operators.run(launch)
    assert "`scan_kernel`" in caught.value.__notes__[0]
    assert "TRITON_PTXAS_PATH" in caught.value.__notes__[0]


class Compiled(triton.compiler.CompiledKernel):
    function, packed_metadata = "function", "metadata"

    def __init__(self, calls):
        self.calls = calls

    def run(self, *arguments):
        *grid, stream, function, metadata, found, enter, exit = arguments[:9]
        assert (stream, function, metadata) == (7, self.function, self.packed_metadata)
        assert found is enter is exit is None
        self.calls.append((tuple(grid), *arguments[9:]))

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append(("hooks", grid, *arguments))


class Kernel:
    """Compiles a kernel in each call."""

    arg_names = ("x", "y", "n", "BLOCK")

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda *arguments, **options: Compiled(self.calls)


def test_compiled_kernel_is_reused_only_for_equal_types(monkeypatch):
    """A kernel compiled for aligned pointers reads wrong addresses of other tensors."""
    monkeypatch.setattr(torch_operators, "_compiled", {})
    monkeypatch.setattr(torch_operators, "current_stream", lambda device: 7)
    kernel, x = Kernel(), torch.ones(64)

    def compiled_before(x, n=3, block=16, programs=2):
        kernel.calls.clear()
        options = {"num_warps": 4, "BLOCK": block}
        (y,) = torch_operators.run(Launch(kernel, programs, (x,), (like(x),), (n,), options))
        assert kernel.calls in ([], [((programs, 1, 1), x, y, n, block)])
        return bool(kernel.calls)

    assert not compiled_before(x)
    assert compiled_before(x)
    assert compiled_before(x[4:].clone(), programs=3)
    for different in ({"x": x[1:]}, {"x": x.half()}, {"n": 4}, {"block": 32}):
        assert not compiled_before(**{"x": x, **different})


def test_compiled_kernel_calls_hooks(monkeypatch):
    """Profilers that add a hook to Triton see only the first launch of a kernel."""
    monkeypatch.setattr(torch_operators, "_compiled", {})
    kernel, x, hook = Kernel(), torch.ones(4), triton.knobs.HookChain()
    monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", hook)
    hook.add(print)
    for _ in range(2):
        torch_operators.run(Launch(kernel, 1, (x,), (like(x),), (3,), {"BLOCK": 4}))
    assert [call[:2] for call in kernel.calls] == [("hooks", (1, 1, 1))]


def test_compiled_kernel_keeps_its_kernel_in_memory(monkeypatch):
    """Fails if a later kernel may get the `id` of one that was deleted."""
    monkeypatch.setattr(torch_operators, "_compiled", {})
    kernel, x = Kernel(), torch.ones(4)
    torch_operators.run(Launch(kernel, 1, (x,), (like(x),), (3,), {"BLOCK": 4}))
    found = weakref.ref(kernel)
    del kernel
    assert found() is not None


def test_launch_while_another_thread_clears_compiled_kernels(monkeypatch):
    """Fails with a KeyError if a launch looks a compiled kernel up twice."""

    class Cleared(dict):
        def __contains__(self, key):
            found = super().__contains__(key)
            self.clear()
            return found

    monkeypatch.setattr(torch_operators, "_compiled", Cleared())
    monkeypatch.setattr(torch_operators, "current_stream", lambda device: 7)
    kernel, x = Kernel(), torch.ones(4)
    for _ in range(2):
        torch_operators.run(Launch(kernel, 1, (x,), (like(x),), (3,), {"BLOCK": 4}))
    assert len(kernel.calls) == 1


def test_next_power_of_2():
    """Fails if an absent dimension, of size 0, has a larger block than one of size 1."""
    assert [next_power_of_2(n) for n in range(6)] == [1, 1, 2, 4, 4, 8]


class GPU:
    """Driver of Triton for a GPU that is not there, for which kernels are compiled."""

    def get_current_target(self):
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


@pytest.mark.skipif(INTERPRETED, reason="compiles kernels")
def test_launches_in_compile_ahead_compile_and_return_zeros(monkeypatch):
    """Kernels of a first call compile one after another, or arbitrary numbers become indices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(triton.runtime.driver, "_active", GPU())

    @triton.jit
    def double(x, y, SIZE: triton.language.constexpr):
        i = triton.language.arange(0, SIZE)
        triton.language.store(y + i, 2 * triton.language.load(x + i))

    x = torch.ones(16)
    launches = [Launch(double, 1, (x,), (like(x),), (), {"SIZE": size}) for size in (8, 16)]
    with torch_operators.compile_ahead() as compiles_only:
        assert compiles_only
        for launch in launches:
            assert not torch_operators.run(launch)[0].any()
    compiled = double.device_caches[0][0].values()
    assert [type(kernel) for kernel in compiled] == [triton.compiler.CompiledKernel] * 2


def test_compile_ahead_without_a_gpu_changes_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with torch_operators.compile_ahead() as compiles_only:
        assert not compiles_only
        assert not torch_operators._thread.compiles_only
