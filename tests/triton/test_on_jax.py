"""The Triton kernels in programs of JAX: interpreted on a CPU, and lowered for GPUs without one."""

import importlib.util
import re

import keras
import pytest

if keras.config.backend() != "jax":
    pytest.skip("runs on JAX", allow_module_level=True)

import jax
import numpy as np

import keras_recurrent
from keras_recurrent import dispatch
from keras_recurrent.backends import triton
from keras_recurrent.backends.jax import _gpu, _platforms
from tests.devices.processes import run_on_simulated_devices
from tests.processes import printed

X = np.ones((1, 4, 2), "float32")
with_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="`triton` is not installed"
)
with_plugin = pytest.mark.skipif(_gpu.unavailable() is not None, reason="JAX has no CUDA plugin")
without_gpu = pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")


# Tests of tests/ops, and of them the cases, that also run with Triton's kernels on JAX.
OPS = ["test_kernels", "test_token_wise", "test_linear_crossentropy", "test_steps"]
CASES = "prime or gelu or layer or bits or widths or chunks or bfloat16 and not step"


@pytest.mark.nightly
@with_triton
@without_gpu
def test_interpreted_kernels_match_definition_and_plain_jax_under_vmap():
    files = [f"tests/ops/{name}.py" for name in OPS]
    command = "-m", "pytest", "-q", "tests/triton/on_jax.py", *files, "--nightly=tests/ops"
    chosen = f"vmap or triton and definition and ({CASES})"
    output = printed(*command, "-k", chosen, TRITON_INTERPRET="1", JAX_PLATFORMS="cpu")
    assert int(re.search(r"(\d+) passed", output)[1]) > 100


@with_triton
@with_plugin
def test_assembler_error_names_the_remedy(monkeypatch):
    import triton

    def fail(*arguments, **options):
        raise triton.runtime.errors.PTXASError("ptxas fatal")

    monkeypatch.setattr(triton, "compile", fail)
    scan = jax.jit(lambda x: keras_recurrent.ops.linear_scan(x, -x)[0])
    with pytest.raises(triton.runtime.errors.PTXASError) as caught:
        scan.trace(np.ones((3, 5, 48), "float32")).lower(lowering_platforms=("cuda",))
    assert "TRITON_PTXAS_PATH" in "".join(caught.value.__notes__)
    assert "implementation('jax')" in "".join(caught.value.__notes__)


@with_triton
def test_decoding_step_runs_outside_of_jit():
    """A call outside of `jit` fails to choose an implementation when it is lowered."""
    kernels = dispatch.IMPLEMENTATIONS["norm_linear"]
    function = _platforms.choose_at_lowering(kernels["jax"], cuda=kernels["triton"])
    x, kernel = np.ones((3, 2), "float32"), jax.numpy.ones((2, 5))
    (y,) = function(x=jax.numpy.asarray(x), kernels=[kernel], biases=[None], gate=None)
    np.testing.assert_array_equal(y, x @ np.ones((2, 5)))


@pytest.mark.nightly
@with_triton
@without_gpu
def test_kernels_on_shards_of_eight_devices():
    """Under `keras.distribution`, in the interpreter: as on one device, and nothing is gathered."""
    # Calls of the host must not keep devices from meeting, for which there are threads.
    environment = {"TRITON_INTERPRET": "1", "NPROC": "32"}
    run_on_simulated_devices(8, "jax_shards", "triton", "model", **environment)


@pytest.mark.nightly
@with_triton
@with_plugin
@without_gpu
def test_programs_lowered_for_gpus_contain_kernels():
    command = "-m", "pytest", "-q", "tests/triton/lowered.py"
    printed(*command, JAX_PLATFORMS="cpu", **{_gpu.OVERRIDE: "90"})


@with_triton
@with_plugin
@without_gpu
def test_which_implementation_on_a_cpu_names_the_reason():
    choice = keras_recurrent.which_implementation("linear_scan", X, -X)
    assert choice.implementation == "jax"
    assert "lowered for CUDA; these tensors are on cpu" in choice.refused["triton"]
    choice = keras_recurrent.which_implementation("linear_scan", X, -X, implementation="triton")
    assert choice.implementation == "triton"
    choice = keras_recurrent.which_implementation(
        "rms_norm", X[0], epsilon=1e-6, implementation="triton"
    )
    assert "XLA fuses this operation with its neighbors" in str(choice)


@with_triton
@with_plugin
@without_gpu
def test_triton_requested_without_a_gpu_raises():
    with pytest.raises(NotImplementedError, match="lowered for CUDA, got one for cpu"):
        keras_recurrent.ops.linear_scan(X, -X, implementation="triton")


@with_triton
@with_plugin
def test_unsupported_names_the_dtype():
    unsupported = dispatch.IMPLEMENTATIONS["linear_scan"]["triton"].unsupported
    assert unsupported(X, X) is None
    assert "not empty, got (1, 0, 2)" in unsupported(X[:, :0], X[:, :0])
    assert "float64" in unsupported(X.astype("float64"), X)
    assert "got complex64" in unsupported(X.astype("complex64"), X)


def test_which_implementation_in_a_traced_program_raises():
    with pytest.raises(ValueError, match="chosen when it is lowered for a platform"):
        jax.jit(lambda x: keras_recurrent.which_implementation("linear_scan", x, x))(X)


def test_capability_variable_must_be_a_number(monkeypatch):
    monkeypatch.setenv(_gpu.OVERRIDE, "9.0")
    with pytest.raises(ValueError, match=f"{_gpu.OVERRIDE} must be a number.*got '9.0'"):
        _gpu.capability.__wrapped__()


def test_missing_plugin_is_a_reason(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(_gpu, "plugin", lambda: None)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: name == "triton" or find_spec(name)
    )
    assert "the extra `jax-cuda` of keras-recurrent installs it" in triton.unavailable()
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "triton" else find_spec(name)
    )
    assert "the extra `jax-cuda` of keras-recurrent installs it" in triton.unavailable()


def test_explicit_mesh_axes_are_rejected_by_name():
    """`jax.make_mesh` makes them by default."""
    mesh = jax.make_mesh((1,), ("rows",))
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P("rows")))
    scan = jax.jit(lambda x: keras_recurrent.ops.linear_scan(x, x)[0])
    with pytest.raises(NotImplementedError, match=r"no mesh with Explicit axes, got \['rows'\]"):
        scan(x)
    auto = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    scan(jax.device_put(X, jax.NamedSharding(auto, jax.P("rows"))))
