"""Attention of cuDNN: which calls it takes, and that they come out as in the other implementations.

What it computes is compared with the definition in `test_sliding_window_attention`, too.
"""

import pytest

import keras_recurrent
from keras_recurrent import dispatch, ops
from tests.gpu import has_gpu
from tests.ops import native
from tests.ops.cases import Case, draw
from tests.ops.judge import check, compare, run
from tests.ops.test_sliding_window_attention import on_a_grid

if dispatch.BACKEND != "torch":
    pytest.skip("is a folder of torch", allow_module_level=True)

import torch

from keras_recurrent.backends import cudnn
from keras_recurrent.backends.cudnn.sliding_window_attention import unsupported
from keras_recurrent.backends.torch import _circular_buffer

OPERATION = "sliding_window_attention"
LONG = Case(2, 640, 64, "bfloat16", heads=(4, 1), window=700, values=64)
on_a_gpu = pytest.mark.skipif(not has_gpu(), reason="needs an NVIDIA GPU")


class Tensor:
    """What is asked of a tensor before a call."""

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
def capability(monkeypatch):
    """A GPU of a compute capability, Hopper's to begin with."""
    found = {torch.device("cuda:0"): (9, 0)}
    monkeypatch.setattr("keras_recurrent.backends.torch._common._capabilities", found)
    return lambda *to: found.update({torch.device("cuda:0"): to})


def test_what_is_taken(capability):
    assert reason() is None
    assert reason(sliding_window=None, dtype=torch.float16, length=512) is None
    assert reason(length=2048, sliding_window=2048) is None
    capability(10, 0)
    assert reason(channels=128) is None


def test_what_is_refused(capability, monkeypatch):
    assert "2049 tokens are more than 2048" in reason(length=2049)
    assert "`initial_state`" in reason(initial_state={})
    assert "documents" in reason(token_kind=Tensor(2, 1024))
    assert "sequences of 512 tokens or more, got 100" in reason(length=100)
    assert reason(length=1000) is None
    with torch.no_grad():  # each length of a prompt would need a plan
        assert "a multiple of 128 tokens without gradients, got 1000" in reason(length=1000)
        assert reason() is None
    assert "float32" in reason(dtype=torch.float32)
    assert "got one on cpu" in reason(device="cpu")
    assert "got 100 and 100" in reason(channels=100)
    assert "got 264 and 264" in reason(channels=264)
    assert "got 256 and 128" in reason(values=128)
    capability(10, 0)
    assert "up to 128, values like keys; got 256" in reason()
    capability(8, 0)
    assert "capability 9.0 or later, got one of 8.0" in reason()
    capability(9, 0)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert "no fixed order" in reason()


def test_a_torch_without_cudnn_says_so(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert cudnn.unavailable() == "this torch was built without cuDNN"


@pytest.mark.parametrize("capacity", [0, 1, 4, 7, 8, 9, 20])
@pytest.mark.parametrize("length", [3, 8, 17])
def test_the_ring_behind_a_whole_document(length, capacity):
    row = torch.randn(2, length, 1, 3)
    position = torch.full((2,), length)
    expected = _circular_buffer.from_sequence(row, position, position, capacity)
    ring = _circular_buffer.from_whole_document(row, capacity)
    assert torch.equal(ring, expected)
    assert ring.is_contiguous()


@on_a_gpu
def test_it_is_chosen():
    q, k, v = (native.tensor(t, "bfloat16") for t in draw(OPERATION, LONG).tensors.values())
    for length, name in ((640, "cudnn"), (639, "triton")):
        choice = keras_recurrent.which_implementation(OPERATION, q, k, v, sliding_window=length)
        assert choice.implementation == name
    with torch.no_grad():
        output, _ = ops.sliding_window_attention(q, k, v)
    assert output.is_contiguous()


@on_a_gpu
@pytest.mark.parametrize("large", ["q", "k"])
def test_queries_that_attend_to_one_key(large):
    drawn = on_a_grid(draw(OPERATION, LONG), **{large: 256})
    check(OPERATION, "cudnn", drawn)


@on_a_gpu
@pytest.mark.parametrize("window", [640, 641, 1000])
def test_the_state_goes_on(window):
    """In the other implementations, in whose rings the first slots may be overwritten."""
    drawn = draw(OPERATION, LONG._replace(window=window))
    compare(OPERATION, "cudnn", drawn, run(OPERATION, "cudnn", drawn))


@on_a_gpu
def test_inside_of_vmap_and_compile():
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
