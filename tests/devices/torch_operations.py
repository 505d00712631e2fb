"""Asserts that operations on tensors that are split over processes match whole tensors."""

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from keras_recurrent import implementation as use_implementation
from keras_recurrent import ops
from keras_recurrent.backends.constants import PADDING
from keras_recurrent.devices.torch_sequence import sequence_parallel

B, T, D, H, G, K = 2, 24, 4, 4, 2, 3
BTD, HEADS, FEWER = (B, T, D), (B, T, H, K), (B, T, G, K)
# {operation: (shapes of its tensors, axis of the channels in each, shape of its state)}
OPERATIONS: dict = {
    "linear_scan": ([BTD, BTD], [2, 2], (B, D)),
    "rg_lru": ([BTD, BTD, BTD, (D,)], [2, 2, 2, 0], (B, D)),
    "causal_conv1d": ([BTD, (4, D), (D,)], [2, 1, 0], (B, 3, D)),
    "complex_linear_scan": ([(B, T, 2 * D), BTD, BTD], None, (B, 2 * D)),
    "gated_linear_attention": ([HEADS] * 4, [2] * 4, (B, H, K, K)),
    "lightning_attention": ([*[HEADS] * 3, (H,)], [2, 2, 2, 0], (B, H, K, K)),
    "scalar_decay_attention": ([FEWER, FEWER, HEADS, (B, T, H)], [2] * 4, (B, H, K, K)),
    "sliding_window_attention": ([HEADS, FEWER, FEWER], [2, 2, 2], None),
}
# {operation: index of its log decays, which are below 0}
LOG_DECAYS = {
    "linear_scan": 1,
    "complex_linear_scan": 1,
    "gated_linear_attention": 3,
    "lightning_attention": 3,
    "scalar_decay_attention": 3,
}


def draw(operation, variant):
    """Returns tensors, options that describe the tokens, and weights of the outputs.

    `variant` is "plain", "documents" (a mask and segments), "kinds" (kinds of tokens) or "state".
    Weights are 0 at padding.
    """
    rng = np.random.default_rng(len(operation))
    shapes, _, state = OPERATIONS[operation]
    tensors = [rng.normal(size=shape) for shape in shapes]
    if operation in LOG_DECAYS:
        index = LOG_DECAYS[operation]
        tensors[index] = -0.3 * np.abs(tensors[index])
    weights = rng.normal(size=(B, T))
    tokens = {}
    if variant == "documents":  # with padding between real tokens, and over all tokens of a process
        real = rng.random((B, T)) < 0.7
        real[0, 6:12] = False
        tokens = {"mask": real, "segment_ids": np.sort(rng.integers(4, size=(B, T)), axis=1)}
        weights = weights * real
    elif variant == "kinds":
        tokens["token_kind"] = rng.integers(3, size=(B, T)).astype("int8")
        weights = weights * (tokens["token_kind"] != PADDING)
    elif variant == "state" and state:
        tensors.append(rng.normal(size=state))
    tensors = [torch.tensor(x, dtype=torch.float32) for x in tensors]
    tokens = {name: torch.tensor(array) for name, array in tokens.items()}
    return tensors, tokens, torch.tensor(weights, dtype=torch.float32)


def output_loss(output, state):
    return output.sum()


def output_and_state_loss(output, state):
    loss = (output**2).sum()
    return loss if state is None else loss + (state**2).sum()


def differentiate(operation, tensors, tokens, weights, loss):
    """Returns the weighted output and the gradients of all tensors, None where there is none.

    `loss` is a function of the weighted output and the state after the last token.
    """
    tensors = [t.detach().clone().requires_grad_() for t in tensors]
    count = len(OPERATIONS[operation][0])
    options = dict(tokens)
    if len(tensors) > count:
        options["initial_state"] = tensors[-1]
    if operation == "sliding_window_attention":
        options["sliding_window"] = 8
    output, state = getattr(ops, operation)(*tensors[:count], **options)
    output = output * weights.reshape(*weights.shape, *[1] * (output.ndim - 2))
    state = state if OPERATIONS[operation][2] else None  # a window of keys and values
    gradients = torch.autograd.grad(loss(output, state), tensors, allow_unused=True)
    return output.detach(), *gradients


def assert_close(actual, expected, tolerance):
    """Tolerance of the largest expected value, or of 1 if that is larger."""
    tolerance *= max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def check_dtensors(operation, mesh, by_channels):
    """Checks `DTensor`s whose batch or channels are split; the state's gradient is missing."""
    tensors, tokens, weights = draw(operation, "kinds")
    expected = differentiate(operation, tensors, tokens, weights, output_loss)

    def split(tensor, axis):
        return distribute_tensor(tensor, mesh, [Replicate() if axis is None else Shard(axis)])

    batch_axis = None if by_channels else 0
    axes = OPERATIONS[operation][1] if by_channels else [0 if t.ndim > 2 else None for t in tensors]
    shards = [split(t, axis) for t, axis in zip(tensors, axes, strict=True)]
    tokens = {name: split(t, batch_axis) for name, t in tokens.items()}
    weights = split(weights, batch_axis)
    actual = differentiate(operation, shards, tokens, weights, output_loss)
    assert actual[0].placements == (Shard(axes[0]),), actual[0].placements
    for x, y in zip(actual, expected, strict=True):
        assert isinstance(x, DTensor)
        assert_close(x.full_tensor(), y, 2e-6)


def check_shards_of_time(operation, variant):
    """Checks tensors whose tokens are split."""
    tensors, tokens, weights = draw(operation, variant)
    expected = differentiate(operation, tensors, tokens, weights, output_and_state_loss)
    has_time = [tuple(t.shape[:2]) == (B, T) for t in tensors]
    shards = [shard_time(t) if timed else t for t, timed in zip(tensors, has_time, strict=True)]
    tokens = {name: shard_time(t) for name, t in tokens.items()}

    def loss(output, state):
        is_last = dist.get_rank() == dist.get_world_size() - 1
        return output_and_state_loss(output, state if is_last else None)

    with sequence_parallel():
        output, *gradients = differentiate(operation, shards, tokens, shard_time(weights), loss)
    assert_close(gather_time(output), expected[0], 5e-6)
    for gradient, tensor, y, timed in zip(gradients, shards, expected[1:], has_time, strict=True):
        gradient = torch.zeros_like(tensor) if gradient is None else gradient
        if timed:
            gradient = gather_time(gradient)
        else:
            dist.all_reduce(gradient)
        assert_close(gradient, torch.zeros_like(gradient) if y is None else y, 5e-6)


def shard_time(tensor):
    return tensor.chunk(dist.get_world_size(), dim=1)[dist.get_rank()].contiguous()


def gather_time(tensor):
    shards = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, tensor.contiguous())
    return torch.cat(shards, dim=1)


def check(split, operation, implementation, rank, processes, folder):
    """`split` is "batch", "channels" or "time"."""
    with use_implementation(None if implementation == "default" else implementation):
        if split == "time":
            for variant in ("plain", "documents", "state"):
                check_shards_of_time(operation, variant)
        else:
            check_dtensors(operation, init_device_mesh("cpu", (processes,)), split == "channels")
