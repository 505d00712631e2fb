"""Properties of the Pallas kernels other than their results, which tests/ops checks."""

import importlib.util
import os
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
from tests.ops import native
from tests.ops.cases import Case, draw
from tests.processes import fresh_process

ROOT = pathlib.Path(__file__).parents[2]
OPERATIONS = [
    o for o, row in dispatch.IMPLEMENTATIONS.items() if not isinstance(row["pallas"], str)
]
# What attention refuses depends on more than dtypes, and is in test_attention.py.
OPERATIONS.remove("sliding_window_attention")
RECURRENCES = ("linear_scan", "rg_lru", "causal_conv1d")
TOPOLOGIES = ("v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
CHIPS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v6 lite": "v6e",
    "TPU7x": "7x",
}
compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="`libtpu` is not installed"
)


def tensors(operation, length=5, dtype="float32"):
    drawn = draw(operation, Case(2, length, 6, dtype))
    return {n: native.tensor(t, drawn.dtypes[n]) for n, t in drawn.tensors.items()}


@compiler
@pytest.mark.nightly
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_compiled_for_tpu_without_a_tpu(topology):
    """At sizes of presets, such as hawk_1.3b. What does not fit VMEM does not compile."""
    reports = fresh_process("-m", "tests.pallas.targets", topology, "1")
    for name, report in reports.items():
        assert report["kernels"] >= 1, name
        # Before silu, the gradient is a tensor in float32: as bfloat16, two of the three moved.
        most = 0.7 if "silu backward" in name else 0.05
        assert report["temporary"] <= most * report["moved"], name


@compiler
@pytest.mark.nightly
def test_compiled_for_eight_chips_without_gathering():
    reports = fresh_process("-m", "tests.pallas.targets", "v5e:2x4", "8")
    for name, report in reports.items():
        moved = [report[c] for c in ("all-gather", "all-to-all", "collective-permute")]
        assert report["kernels"] >= 1, name
        assert moved == [0, 0, 0], name


@compiler
@pytest.mark.nightly
def test_a_training_step_of_hawk_compiles():
    """Two kernels a block, each forward, forward again where the block recomputes, and backward."""
    report = fresh_process("-m", "tests.pallas.training")
    assert report["parameters"] == SIZES["hawk_1.3b"].parameters
    assert report["kernels"] == 6 * SIZES["hawk_1.3b"].num_layers
    assert report["peak"] < 16 * 2**30


@pytest.mark.nightly
def test_shards_of_eight_devices():
    """Under `keras.distribution`, in the interpreter: as on one device, and nothing is gathered."""
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"
    reports = fresh_process(
        "-m", "tests.ops.shards", "pallas", XLA_FLAGS=flags, JAX_PLATFORMS="cpu"
    )
    for name, report in reports.items():
        assert report["gathers"] == 0, name
        assert report["error"] < 1e-5, name
        assert report["shard"] == ([1, 20, 256] if "data" in name else [2, 20, 128])


@pytest.mark.parametrize("kind", CHIPS)
def test_vmem_is_that_of_the_chip_or_as_one_says(kind, monkeypatch):
    device = jax.sharding.AbstractDevice(kind, 1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("batch",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert _common.vmem_bytes() == _common.VMEM[CHIPS[kind]] * 2**20
        monkeypatch.setenv(_common.VMEM_OVERRIDE, "3")
        assert _common.vmem_bytes() == 3 * 2**20


def test_plain_runs_on_a_cpu_and_says_so():
    x = native.tensor([[[1.0, 2.0]]], "float32")
    choice = keras_recurrent.which_implementation("linear_scan", x, -x)
    assert choice.implementation == "jax"
    assert "lowered for TPU; these tensors are on cpu" in choice.refused["pallas"]
    named = keras_recurrent.which_implementation("linear_scan", x, -x, implementation="pallas")
    assert named.implementation == "pallas"


def test_one_program_serves_a_cpu_and_a_tpu():
    """Traced once, and lowered for both: the kernels are in one of them only."""
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


@pytest.mark.parametrize("call", NAMED.values(), ids=NAMED)
def test_a_named_kernel_is_not_replaced(call):
    x = np.ones((2, 16, 6), "float32")
    match = r"lowered for TPU, got one for cpu: .*`with jax.*force_tpu_interpret_mode\(\):`"
    for run, given in (
        (call, x),
        (jax.jit(call), x),
        (jax.jit(jax.vmap(call)), x[None]),
        (jax.grad(lambda x: call(x).sum()), x),
    ):
        with pytest.raises(NotImplementedError, match=match):
            run(given)


def test_a_named_kernel_is_interpreted_where_one_asks_for_it():
    x = np.random.default_rng(0).normal(size=(2, 16, 6)).astype("float32")

    def call(x, implementation):
        return ops.linear_scan(x, -x * x, implementation=implementation)[0]

    with jax.experimental.pallas.tpu.force_tpu_interpret_mode():
        found = jax.jit(lambda x: call(x, "pallas"))(x)
    np.testing.assert_allclose(found, call(x, "jax"), rtol=1e-5, atol=1e-5)


def test_transformed():
    """`vmap` and `jax.checkpoint`, where both kernels are traced and the plain one runs."""
    x = np.random.default_rng(0).normal(size=(3, 2, 40, 6)).astype("float32")

    def loss(x, implementation=None):
        return jnp.sum(ops.linear_scan(x, -x * x, implementation=implementation)[0] ** 2)

    expected = [jax.grad(loss)(row, "jax") for row in x]
    result = jax.jit(jax.vmap(jax.grad(jax.checkpoint(loss))))(x)
    np.testing.assert_allclose(result, np.stack(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("operation", [o for o in OPERATIONS if "window" not in o])
def test_what_is_refused(operation):
    unsupported = dispatch.IMPLEMENTATIONS[operation]["pallas"].unsupported
    for dtype in ("bfloat16", "float32"):
        assert unsupported(**tensors(operation, dtype=dtype)) is None
    assert "float16" in unsupported(**tensors(operation, dtype="float16"))
    with jax.enable_x64(True):
        assert "float64" in unsupported(**tensors(operation, dtype="float64"))


def test_what_is_refused_by_size():
    unsupported = dispatch.IMPLEMENTATIONS["causal_conv1d"]["pallas"].unsupported
    x = jnp.ones((1, 40, 2))
    for taps in (1, 17):
        assert f"2 to 16 taps, got one of {taps}" in unsupported(x, x[0, :taps])
    length, *_ = jax.export.symbolic_shape("t")
    symbolic = jax.ShapeDtypeStruct((1, length, 2), "float32")
    reason = dispatch.IMPLEMENTATIONS["linear_scan"]["pallas"].unsupported(symbolic, symbolic)
    assert "known when a program is traced" in reason


@pytest.mark.nightly
@pytest.mark.parametrize("operation", RECURRENCES)
def test_several_blocks(operation):
    """Two blocks of channels, the second one short, and of tokens, with padding in one of them."""
    from tests.ops.judge import check

    drawn = draw(operation, Case(1, 1100, 600, kinds=True, state=True))
    drawn.token_kind[:, :1024] = 0
    check(operation, "pallas", drawn)
