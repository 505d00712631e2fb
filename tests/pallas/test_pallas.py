"""Properties of the Pallas kernels other than their results, which tests/ops checks."""

import importlib.util
import pathlib

import keras
import pytest

if keras.config.backend() != "jax":
    pytest.skip("runs on JAX", allow_module_level=True)

import jax
import jax.numpy as jnp
import numpy as np

if jax.default_backend() == "gpu":
    pytest.skip("kernels for TPU are interpreted and lowered on a CPU", allow_module_level=True)

import keras_recurrent
from keras_recurrent import dispatch, ops
from keras_recurrent.backends.pallas import _common
from keras_recurrent.presets.griffin import SIZES
from tests.devices.processes import run_on_simulated_devices
from tests.ops import native
from tests.ops.cases import Case, draw
from tests.ops.judge import check
from tests.processes import fresh_process

ROOT = pathlib.Path(__file__).parents[2]
PALLAS = {
    operation: row["pallas"]
    for operation, row in dispatch.IMPLEMENTATIONS.items()
    if not isinstance(row["pallas"], str)
}
TOPOLOGIES = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
CHIPS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v6 lite": "v6e",
    "TPU7x": "7x",
}
has_tpu = jax.default_backend() == "tpu"
compiler = pytest.mark.skipif(
    has_tpu or importlib.util.find_spec("libtpu") is None,
    reason="needs `libtpu`, and no TPU, which one process uses at a time",
)
on_a_cpu = pytest.mark.skipif(has_tpu, reason="on a TPU, the kernels are not interpreted")


@compiler
@pytest.mark.nightly
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_kernels_of_preset_sizes_compile_for_tpu(topology):
    """A kernel does not fit into VMEM, or XLA copies tensors around it."""
    reports = fresh_process("-m", "tests.pallas.targets", topology, "1")
    for name, report in reports.items():
        assert report["kernels"] >= 1, name
        # The gradient before SiLU is float32, as large as two of the three tensors in bfloat16.
        limit = 0.7 if "silu backward" in name else 0.05
        assert report["temporary"] <= limit * report["moved"], name


@compiler
@pytest.mark.nightly
def test_kernels_for_eight_chips_need_no_communication():
    """A distributed kernel gathers or moves shards between chips."""
    reports = fresh_process("-m", "tests.pallas.targets", "v5e:2x4", "8")
    for name, report in reports.items():
        assert report["kernels"] >= 1, name
        assert report["collectives"] == 0, name


@compiler
@pytest.mark.nightly
def test_training_step_of_hawk_compiles_for_tpu():
    """A kernel is not used in training, or memory exceeds a chip's.

    Each block has two kernels, which run forward, again forward to recompute, and backward.
    """
    report = fresh_process("-m", "tests.pallas.training")
    assert report["parameters"] == SIZES["hawk_1.3b"].parameters
    assert report["kernels"] == 6 * SIZES["hawk_1.3b"].backbone_arguments["num_layers"]
    assert report["peak"] < 16 * 2**30


@on_a_cpu
@pytest.mark.nightly
def test_interpreted_kernels_on_eight_devices_equal_one_device():
    """Under `keras.distribution`, gradients are wrong or shards are gathered."""
    run_on_simulated_devices(8, "jax_shards", "pallas")


@pytest.mark.parametrize("kind", CHIPS)
def test_vmem_is_that_of_the_chip_or_of_the_environment_variable(kind, monkeypatch):
    device = jax.sharding.AbstractDevice(kind, 1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("batch",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert _common.vmem_bytes() == _common.VMEM[CHIPS[kind]] * 2**20
        monkeypatch.setenv(_common.VMEM_OVERRIDE, "3")
        assert _common.vmem_bytes() == 3 * 2**20


@on_a_cpu
def test_plain_jax_runs_on_a_cpu_unless_pallas_is_named():
    """The choice on a CPU is the Pallas kernel, or its reason is missing."""
    x = native.tensor([[[1.0, 2.0]]], "float32")
    choice = keras_recurrent.which_implementation("linear_scan", x, -x)
    assert choice.implementation == "jax"
    assert "lowered for TPU; these tensors are on cpu" in choice.refused["pallas"]
    choice = keras_recurrent.which_implementation("linear_scan", x, -x, implementation="pallas")
    assert choice.implementation == "pallas"


def test_traced_function_has_kernels_only_when_lowered_for_tpu():
    """A function that is lowered for both platforms gets kernels on a CPU, or none on a TPU."""
    x = np.ones((2, 40, 6), "float32")

    def loss(x):
        return jnp.sum(ops.linear_scan(x, -x)[0])

    traced = jax.jit(jax.grad(loss)).trace(x)
    texts = {p: traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "tpu")}
    assert texts["tpu"].count("tpu_custom_call") >= 2
    assert "tpu_custom_call" not in texts["cpu"]


NAMED = {
    "linear_scan": lambda x: ops.linear_scan(x, -x, implementation="pallas")[0],
    "lightning_attention": lambda x: ops.lightning_attention(
        *[x[:, :, None]] * 3, -np.ones(1, "float32"), implementation="pallas"
    )[0],
    "sliding_window_attention": lambda x: ops.sliding_window_attention(
        *[x[:, :, None]] * 3, sliding_window=4, implementation="pallas"
    )[0],
}


@on_a_cpu
@pytest.mark.parametrize("call", NAMED.values(), ids=NAMED)
def test_named_kernel_on_a_cpu_raises_an_error(call):
    """A kernel that was chosen by name is replaced by plain JAX, in some transform."""
    x = np.ones((2, 16, 6), "float32")
    match = r"lowered for TPU, got one for cpu: .*`with jax.*force_tpu_interpret_mode\(\):`"
    for function, argument in (
        (call, x),
        (jax.jit(call), x),
        (jax.jit(jax.vmap(call)), x[None]),
        (jax.grad(lambda x: call(x).sum()), x),
    ):
        with pytest.raises(NotImplementedError, match=match):
            function(argument)


@on_a_cpu
def test_named_kernel_in_interpret_mode_equals_plain_jax():
    """`force_tpu_interpret_mode`, which the error recommends, does not run the kernel."""
    x = np.random.default_rng(0).normal(size=(2, 16, 6)).astype("float32")

    def call(x, implementation):
        return ops.linear_scan(x, -x * x, implementation=implementation)[0]

    with jax.experimental.pallas.tpu.force_tpu_interpret_mode():
        result = jax.jit(lambda x: call(x, "pallas"))(x)
    np.testing.assert_allclose(result, call(x, "jax"), rtol=1e-5, atol=1e-5)


def test_vmap_of_checkpointed_gradient_equals_gradients_of_plain_jax():
    """A transform that traces both kernels fails, or runs another one than plain JAX."""
    x = np.random.default_rng(0).normal(size=(3, 2, 40, 6)).astype("float32")

    def loss(x, implementation=None):
        return jnp.sum(ops.linear_scan(x, -x * x, implementation=implementation)[0] ** 2)

    expected = [jax.grad(loss)(row, "jax") for row in x]
    result = jax.jit(jax.vmap(jax.grad(jax.checkpoint(loss))))(x)
    np.testing.assert_allclose(result, np.stack(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("operation", sorted(PALLAS))
def test_gradient_of_float32_is_traced_with_64_bit_types(operation):
    """A kernel, which a CPU traces too, mixes 32 and 64 bits under `jax_enable_x64`."""
    drawn = draw(operation, Case(2, 70, 16, kinds=True))
    given = {**native.tensors(drawn), **drawn.options}

    def loss(tensors):
        return jnp.sum(getattr(ops, operation)(**given | tensors)[0])

    with jax.enable_x64(True):
        floats = {n: x for n, x in given.items() if getattr(x, "dtype", None) == "float32"}
        jax.jit(jax.grad(loss)).trace(floats)


# `test_attention.py` tests the unsupported calls of softmax attention.
@pytest.mark.parametrize("operation", sorted(PALLAS.keys() - {"sliding_window_attention"}))
def test_kernel_supports_float32_and_bfloat16_alone(operation):
    """A dtype that TPUs do not have is passed to a kernel, or a supported one is not."""
    for dtype in ("bfloat16", "float32", "float16", "float64"):
        with native.precision(dtype):
            tensors = native.tensors(draw(operation, Case(2, 5, 6, dtype)))
            reason = PALLAS[operation].unsupported(**tensors)
        assert reason is None if dtype in ("bfloat16", "float32") else dtype in reason


@pytest.mark.parametrize("taps", [1, 17])
def test_convolution_of_other_than_2_to_16_taps_is_unsupported(taps):
    x = jnp.ones((1, 40, 2))
    reason = PALLAS["causal_conv1d"].unsupported(x=x, kernel=x[0, :taps])
    assert f"2 to 16 taps, got one of {taps}" in reason


def test_symbolic_length_is_unsupported():
    """An exported program with a symbolic length fails in a kernel."""
    length, *_ = jax.export.symbolic_shape("t")
    symbolic = jax.ShapeDtypeStruct((1, length, 2), "float32")
    reason = PALLAS["linear_scan"].unsupported(x=symbolic, log_a=symbolic)
    assert "known when a program is traced" in reason


@pytest.mark.nightly
@pytest.mark.parametrize("operation", ["linear_scan", "rg_lru", "causal_conv1d"])
def test_recurrence_of_several_blocks_matches_definition(operation):
    """Of two blocks of channels and of tokens, the second, incomplete one is wrong."""
    drawn = draw(operation, Case(1, 1100, 600, kinds=True, state=True))
    drawn.token_kind[:, :1024] = 0
    check(operation, "pallas", drawn)
