"""Properties of the Triton kernels other than their results, which tests/ops checks."""

import types

import keras
import pytest

if keras.config.backend() != "torch":
    pytest.skip("runs on torch", allow_module_level=True)

import torch

from keras_recurrent import dispatch
from keras_recurrent.backends.constants import CONTINUES, PADDING, STARTS
from keras_recurrent.backends.triton._attention import banded_attention
from keras_recurrent.backends.triton._runtime import torch_operators
from tests.ops import judge, native, steps, token_wise
from tests.ops.cases import DRAW, Case, draw
from tests.processes import fresh_process

OPERATIONS = [o for o in DRAW if not isinstance(dispatch.IMPLEMENTATIONS[o]["triton"], str)]
# It takes seconds in Triton's interpreter; lightning_attention runs most of its kernels.
SCALAR = pytest.param("scalar_decay_attention", marks=pytest.mark.nightly)


def parametrize(operations):
    operations = [SCALAR if o == "scalar_decay_attention" else o for o in operations]
    return pytest.mark.parametrize("operation", operations)


every_operation = parametrize(OPERATIONS)
every_kernel = parametrize([*OPERATIONS, *token_wise.DRAW])
LINEAR = ("gated_linear_attention", "lightning_attention", "scalar_decay_attention")
attention = parametrize([*LINEAR, "sliding_window_attention"])
linear_attention = parametrize(LINEAR)
ON_GPU = torch.cuda.is_available()


def draw_small(operation, length, *dtypes):
    if operation in DRAW:
        return draw(operation, Case(2, length, 6, *dtypes, heads=(2, 1)))
    return token_wise.draw(operation, token_wise.Case((2, length, 6), *dtypes))


def arguments(operation, length, *dtypes):
    return native.tensors(draw_small(operation, length, *dtypes))


LARGE = (*LINEAR, "sliding_window_attention")  # with many programs


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("operations", "least"),
    [*(([name], 40) for name in LARGE), (["--except", *LARGE], 150)],
    ids=[*LARGE, "others"],
)
def test_kernels_compiled_for_hopper_fit_its_resources(tmp_path, operations, least):
    """A kernel spills registers or needs too much memory in a configuration of its search."""
    programs = fresh_process(
        *("-m", "tests.triton.hopper", *operations),
        **{"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert len(programs) >= least
    defaults = {}  # of searches, which were run on a GPU
    for program in programs:
        default = defaults.setdefault((program["kernel"], program["search"]), program)
        assert_fits(program, default["resources"]["asynchronous"])


# Spilled bytes with which a GPU was faster than with smaller tiles. With fewer registers, more
# programs run at a time, which may be worth some spills; other kernels spill up to 128 bytes.
LIMITED_SPILLS = 256
SPILLS = {
    ("prepare_kernel", "one document"): 0,
    ("prepare_kernel", "tied, one document"): 32,
    ("prepare_kernel", "kinds"): 8,
    ("prepare_kernel", "tied, kinds"): 8,
    ("gradient_kernel", "256 channels"): 256,
    ("flagged_kernel", "tied, kinds"): 168,  # No other tiles were tried.
    ("queries_kernel", "256 channels, kinds, float32"): 576,
    ("attend_kernel", "256 channels"): 320,
    # With decays of each token; not yet timed on a GPU.
    ("_walk_kernel", "kinds, 128 channels"): 320,
}
# CUDA's sines keep 32 bytes in memory, for angles of more than 1e5; products of float32 spill some.
# 4-bit layers keep four words until they are needed, so that two programs fit a multiprocessor.
IN_MEMORY = {
    ("norm_quantized_linear", "three, 4 bits"): 16,
    ("norm_quantized_linear", "down, 4 bits"): 16,
    ("lightning_step", ""): 40,
    ("local_attention_step", ""): 32,
    ("local_attention_step", "one part"): 32,
    ("local_attention_step", "float32"): 88,
}
WITHOUT_PRODUCTS = ("_step_kernel", "_sum_decays_kernel", "_decay_gradient_kernel")
MULTIPROCESSOR_MEMORY = 227 * 1024


def assert_fits(program, most_asynchronous):
    """most_asynchronous: the number of such products in the default, which was run on a GPU."""
    operation, variant, kernel = (program[name] for name in ("operation", "variant", "kernel"))
    resources, is_limited = program["resources"], program["is_limited"]
    spilled, shared = resources["spilled"], resources["shared"]
    has_products, asynchronous = resources["tensor cores"] > 0, resources["asynchronous"]
    assert spilled <= SPILLS.get((kernel, variant), 512), program
    assert shared <= MULTIPROCESSOR_MEMORY, program
    if operation in (*token_wise.DRAW, "linear_crossentropy"):
        assert spilled <= (96 if "16384" in variant else 0), program
    elif operation in (*steps.DRAW, "tokens"):
        assert spilled <= IN_MEMORY.get((operation, variant), 0), program
        assert has_products or operation != "norm_quantized_linear", program
    elif operation == "adam":
        assert not spilled, program
        assert bool(resources["vectors"]) == (variant == "vectors"), program
    elif operation in LINEAR:
        default = LIMITED_SPILLS if is_limited else 128
        assert spilled <= SPILLS.get((kernel, variant), default), program
        is_alone = kernel in ("_walk_kernel", "stream_kernel")  # on a multiprocessor
        assert shared <= MULTIPROCESSOR_MEMORY / (1 if is_alone else 2), program
        assert has_products == (kernel not in WITHOUT_PRODUCTS), program
        # With more, their descriptors exceed the registers for them (`products.py`). Of kernels
        # with fewer registers, one with 8 of them was right on a GPU.
        assert asynchronous <= (8 if is_limited else 32), program
    elif operation == "sliding_window_attention":
        assert has_products == (kernel != "fill_buffers_kernel"), program
        assert asynchronous <= max(32, most_asynchronous), program
        assert "float32" in variant or not resources["transposed"], program


@every_kernel
def test_unsupported_names_float64_and_cpu_tensors(operation, monkeypatch):
    def reason(*dtypes):
        drawn = draw_small(operation, 5, *dtypes)
        tensors = native.tensors(drawn)
        return judge.unsupported_reason(operation, "triton", {**tensors, **drawn.options})

    for dtypes in (("float32",), ("float16", "bfloat16"), ("bfloat16", "float32"), ("bfloat16",)):
        assert reason(*dtypes) is None
    assert "float64" in reason("float64")
    monkeypatch.setattr(torch_operators, "INTERPRETED", False)
    monkeypatch.setattr(native, "DEVICE", "cpu")
    assert "needs CUDA tensors, got one on cpu" in reason("float32")


def test_unsupported_names_older_gpus(monkeypatch):
    tensor = types.SimpleNamespace(dtype=torch.float32, is_cuda=True, device="cuda:0")
    for capability, reason in (((9, 0), None), ((7, 5), "8.0 or later, got one of 7.5")):
        found = {"cuda:0": capability}
        monkeypatch.setattr("keras_recurrent.backends.torch._common._capabilities", found)
        refused = torch_operators.unsupported_reason(tensor)
        assert refused is None if reason is None else reason in refused


# (operation, shapes of its tensors, options, unsupported reason or None)
LIMITS = [
    (
        "causal_conv1d",
        {"x": (1, 40, 1), "kernel": (17, 1)},
        {},
        "up to 16 taps, got a kernel of 17",
    ),
    ("rms_norm", {"x": (1, 16384)}, {"scale": None, "epsilon": 1e-6}, None),
    ("rms_norm", {"x": (1, 16385)}, {"scale": None, "epsilon": 1e-6}, "up to 16384 channels, got"),
    ("argmax", {"x": (1, 0)}, {}, "got 0"),
    ("argmax", {"x": (1, 3_000_000)}, {}, "got 3000000"),
    ("top_logits", {"x": (1, 20)}, {"count": 17}, "got 17"),
    ("top_logits", {"x": (1, 10)}, {"count": 12}, "got 10"),
    ("top_logits", {"x": (1, 600_000)}, {"count": 16}, "got 600000"),
]


@pytest.mark.parametrize(("operation", "shapes", "options", "reason"), LIMITS)
def test_unsupported_names_sizes_above_a_limit(operation, shapes, options, reason):
    tensors = {n: torch.zeros(shape, device=native.DEVICE) for n, shape in shapes.items()}
    refused = judge.unsupported_reason(operation, "triton", {**tensors, **options})
    assert refused is None if reason is None else reason in refused


@attention
@pytest.mark.parametrize(
    ("channels", "dtype", "reason"),
    [
        (257, "float32", "up to 256 channels, got 257"),
        (33, "bfloat16", "an even number of channels a head, got 33"),
        (33, "float32", None),
    ],
)
def test_unsupported_names_head_sizes(operation, channels, dtype, reason):
    drawn = draw(operation, Case(1, 2, channels, dtype))
    tensors = {n: native.tensor(t, drawn.dtypes[n]) for n, t in drawn.tensors.items()}
    refused = dispatch.IMPLEMENTATIONS[operation]["triton"].unsupported(**tensors)
    assert refused is None if reason is None else reason in refused


@linear_attention
def test_linear_attention_with_heads_of_several_tiles(operation):
    """Tiles of bfloat16 are larger than those of float32; decays are float32, as in HGRN2."""
    case = Case(1, 20, 130, "bfloat16", "float32", kinds=True, state=True, heads=(2, 1))
    judge.check(operation, "triton", draw(operation, case))


@pytest.mark.parametrize("programs", [1, 256])
def test_attention_with_shared_key_heads(programs, monkeypatch):
    """In one part or in several; some tiles of keys are seen by all rows, without a mask."""
    monkeypatch.setattr(banded_attention, "_MANY_PROGRAMS", programs)
    drawn = draw(
        "sliding_window_attention",
        Case(1, 200, 18, "bfloat16", heads=(3, 1), window=150, kinds=True, state=True),
    )
    drawn.token_kind[:] = CONTINUES
    drawn.token_kind[:, [20, 170]] = PADDING, STARTS
    drawn.d_output[:, 20] = 0
    judge.check("sliding_window_attention", "triton", drawn)


@every_operation
def test_operations_with_partial_tiles(operation):
    """A result is wrong in the second, partial block of channels or in a later tile of time."""
    length = 150
    if operation.endswith("attention"):
        length = 70 if operation.startswith("sliding") else 20  # two chunks
    case = Case(1, length, 70, kinds=True, state=True, heads=(2, 1))
    judge.check(operation, "triton", draw(operation, case))


@every_kernel
def test_operations_with_strided_tensors(operation):
    """A kernel reads the memory of a tensor or gradient as if it were contiguous."""
    drawn, results = draw_small(operation, 20), []
    tensors = native.tensors(drawn)
    scattered = {n: t.mT.contiguous().mT if t.ndim > 1 else t for n, t in tensors.items()}
    for given in (tensors, scattered):
        leaves = [given[name].requires_grad_() for name in drawn.differentiated]
        found = judge.function_of(operation, "triton")(**given, **drawn.options)
        found = keras.tree.flatten(found)
        # The gradient of a sum is one number, expanded, which is not contiguous, either.
        loss = sum(x.sum() for x in found if x.requires_grad)
        results.append((*found, *torch.autograd.grad(loss, leaves)))
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


# A program of token_crossentropy has one row.
@pytest.mark.parametrize("operation", [o for o in token_wise.DRAW if o != "token_crossentropy"])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 16384), "bfloat16"), ((1100, 40), "float32"), ((300, 260), "bfloat16")],
    ids=str,
)
def test_token_wise_programs_with_several_tiles_match_definition(
    operation, shape, dtype, monkeypatch
):
    """A program skips or repeats one of its tiles."""
    monkeypatch.setattr("keras_recurrent.backends.triton._device.token_wise._WARPS", 12)
    drawn = token_wise.draw(operation, token_wise.Case(shape, dtype, "float32"))
    judge.check(operation, "triton", drawn)
