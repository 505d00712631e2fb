"""Attention of cuDNN: supported calls, and results on a GPU.

`test_sliding_window_attention` also judges its results by the definition.
"""

import pytest

import keras_recurrent
from keras_recurrent import dispatch, ops
from tests.gpu import has_gpu
from tests.ops import native
from tests.ops.cases import Case, draw
from tests.ops.judge import check, compare, run
from tests.ops.test_sliding_window_attention import round_to_sixteenths

if dispatch.BACKEND != "torch":
    pytest.skip("runs on torch", allow_module_level=True)

import torch

from keras_recurrent.backends import cudnn
from keras_recurrent.backends.cudnn.sliding_window_attention import unsupported
from keras_recurrent.backends.torch import _circular_buffer

OPERATION = "sliding_window_attention"
LONG = Case(2, 640, 64, "bfloat16", heads=(4, 1), window=700, values=64)
on_a_gpu = pytest.mark.skipif(not has_gpu(), reason="needs an NVIDIA GPU")


class Tensor:
    """The attributes of a tensor that `unsupported` reads."""

    def __init__(self, *shape, dtype=torch.bfloat16, device="cuda:0"):
        self.shape, self.dtype, self.device = shape, dtype, torch.device(device)
        self.is_cuda = self.device.type == "cuda"


def reason(length=1024, channels=256, values=None, dtype=torch.bfloat16, device="cuda:0", **given):
    q, k, v = (
        Tensor(2, length, heads, size, dtype=dtype, device=device)
        for heads, size in ((4, channels), (1, channels), (1, values or channels))
    )
    return unsupported(q, k, v, **{"sliding_window": 2048, **given})


@pytest.fixture
def set_capability(monkeypatch):
    """Sets the compute capability of a simulated GPU, at first Hopper's."""
    capabilities = {torch.device("cuda:0"): (9, 0)}
    monkeypatch.setattr("keras_recurrent.backends.torch._common._capabilities", capabilities)
    return lambda *capability: capabilities.update({torch.device("cuda:0"): capability})


def test_cudnn_supports_long_sequences_in_16_bits(set_capability):
    assert reason() is None
    assert reason(sliding_window=None, dtype=torch.float16, length=512) is None
    assert reason(length=2048, sliding_window=2048) is None
    assert reason(length=1000) is None
    set_capability(10, 0)
    assert reason(channels=128) is None


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("2049 tokens are more than 2048", {"length": 2049}),
        ("`initial_state`", {"initial_state": {}}),
        ("documents", {"token_kind": Tensor(2, 1024)}),
        ("sequences of 512 tokens or more, got 100", {"length": 100}),
        ("float32", {"dtype": torch.float32}),
        ("got one on cpu", {"device": "cpu"}),
        ("got 100 and 100", {"channels": 100}),
        ("got 264 and 264", {"channels": 264}),
        ("got 256 and 128", {"values": 128}),
    ],
)
def test_cudnn_gives_the_reason_why_a_call_is_unsupported(message, call, set_capability):
    assert message in reason(**call)


def test_cudnn_without_gradients_needs_multiples_of_128_tokens(set_capability):
    """Every length of a prompt compiles another plan."""
    with torch.no_grad():
        assert "a multiple of 128 tokens without gradients, got 1000" in reason(length=1000)
        assert reason() is None


def test_cudnn_depends_on_the_gpu_and_on_determinism(set_capability, monkeypatch):
    set_capability(10, 0)
    assert "up to 128, values like keys; got 256" in reason()
    set_capability(8, 0)
    assert "capability 9.0 or later, got one of 8.0" in reason()
    set_capability(9, 0)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "no fixed order" in reason()


def test_torch_built_without_cudnn_is_the_reason(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert cudnn.unavailable() == "this torch was built without cuDNN"


@pytest.mark.parametrize("capacity", [0, 1, 4, 7, 8, 9, 20])
@pytest.mark.parametrize("length", [3, 8, 17])
def test_ring_buffer_of_whole_document_equals_general_one(length, capacity):
    """A token is in the wrong slot after a prompt of one document."""
    tokens = torch.randn(2, length, 1, 3)
    position = torch.full((2,), length)
    expected = _circular_buffer.from_sequence(tokens, position, position, capacity)
    buffer = _circular_buffer.from_whole_document(tokens, capacity)
    assert torch.equal(buffer, expected)
    assert buffer.is_contiguous()


@on_a_gpu
def test_cudnn_is_chosen_unless_the_window_is_shorter_than_the_sequence():
    q, k, v = (native.tensor(t, "bfloat16") for t in draw(OPERATION, LONG).tensors.values())
    for length, name in ((640, "cudnn"), (639, "triton")):
        choice = keras_recurrent.which_implementation(OPERATION, q, k, v, sliding_window=length)
        assert choice.implementation == name
    with torch.no_grad():
        output, _ = ops.sliding_window_attention(q, k, v)
    assert output.is_contiguous()


@on_a_gpu
@pytest.mark.parametrize("large", ["q", "k"])
def test_attention_to_a_single_key_has_exact_gradients(large):
    drawn = round_to_sixteenths(draw(OPERATION, LONG), **{large: 256})
    check(OPERATION, "cudnn", drawn)


@on_a_gpu
@pytest.mark.parametrize("window", [640, 641, 1000])
def test_cudnn_final_state_matches_definition(window):
    """Another implementation that continues from the state reads wrong slots."""
    drawn = draw(OPERATION, LONG._replace(window=window))
    compare(OPERATION, "cudnn", drawn, run(OPERATION, "cudnn", drawn))


@on_a_gpu
def test_cudnn_inside_vmap_and_compile_equals_eager_call():
    q, k, v = (native.tensor(t, "bfloat16") for t in draw(OPERATION, LONG).tensors.values())

    def loss(q, k, v):
        output, _ = ops.sliding_window_attention(q, k, v, implementation="cudnn")
        return output.float().square().sum()

    expected = torch.func.grad(loss, (0, 1, 2))(q, k, v)
    for function in (torch.compile(loss), loss):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        found = torch.autograd.grad(function(*leaves), leaves)
        for x, y in zip(found, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
    each = torch.vmap(loss)(*(x[:, None] for x in (q, k, v)))
    torch.testing.assert_close(each.sum(), loss(q, k, v), rtol=1e-3, atol=0)
