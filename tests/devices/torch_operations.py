"""Asserts that operations on tensors that are split over processes match whole tensors."""

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from keras_recurrent import implementation as use_implementation
from keras_recurrent import ops
from keras_recurrent.devices.torch_sequence import sequence_parallel
from tests.ops import cases

B, T = 2, 24


def draw(operation, variant):
    """Returns tensors, options, arrays that describe the tokens, and weights of the outputs.

    `variant` is "plain", "documents" (a mask and segments), "kinds" (kinds of tokens) or "state".
    Weights are 0 at padding.
    """
    rng = np.random.default_rng(len(operation))
    case = cases.Case(B, T, 4, kinds=variant == "kinds", state=variant == "state", window=8)
    drawn = cases.draw(operation, case)
    arrays, tokens, weights = dict(drawn.tensors), {}, rng.normal(size=(B, T))
    if variant == "documents":  # with padding between real tokens, and over all tokens of a process
        real = rng.random((B, T)) < 0.7
        real[0, 6:12] = False
        tokens = {"mask": real, "segment_ids": np.sort(rng.integers(4, size=(B, T)), axis=1)}
        weights = weights * real
    elif variant == "kinds":
        tokens, weights = {"token_kind": drawn.token_kind}, weights * ~drawn.padding
    elif isinstance(drawn.initial_state, np.ndarray):  # else a window of keys and values
        arrays["initial_state"] = drawn.initial_state
    tensors = {n: torch.tensor(array, dtype=torch.float32) for n, array in arrays.items()}
    tokens = {n: torch.tensor(array) for n, array in tokens.items()}
    return tensors, drawn.options, tokens, torch.tensor(weights, dtype=torch.float32)


def output_loss(output, state):
    return output.sum()


def output_and_state_loss(output, state):
    loss = (output**2).sum()
    return loss if state is None else loss + (state**2).sum()


def differentiate(operation, tensors, options, weights, loss):
    """Returns the weighted output and the gradients of all tensors, None where there is none.

    `loss` is a function of the weighted output and the state after the last token.
    """
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    output, state = getattr(ops, operation)(**leaves, **options)
    output = output * weights.reshape(*weights.shape, *[1] * (output.ndim - 2))
    state = None if isinstance(state, dict) else state  # a window of keys and values
    value = loss(output, state)
    return output.detach(), *torch.autograd.grad(value, [*leaves.values()], allow_unused=True)


def assert_close(actual, expected, tolerance):
    """Tolerance of the largest expected value, or of 1 if that is larger."""
    tolerance *= max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def check_dtensors(operation, mesh, by_channels):
    """Checks `DTensor`s whose batch or channels are split; the state's gradient is missing."""
    tensors, options, tokens, weights = draw(operation, "kinds")
    expected = differentiate(operation, tensors, options | tokens, weights, output_loss)

    def split(tensor):
        is_parameter = tensor.ndim < 3 and tensor.shape != (B, T)
        if by_channels:  # the third axis of sequences, the last one of parameters
            axis = tensor.ndim - 1 if is_parameter else 2 if tensor.ndim > 2 else None
        else:
            axis = None if is_parameter else 0
        return distribute_tensor(tensor, mesh, [Replicate() if axis is None else Shard(axis)])

    shards, tokens = ({n: split(t) for n, t in given.items()} for given in (tensors, tokens))
    actual = differentiate(operation, shards, options | tokens, split(weights), output_loss)
    assert actual[0].placements == (Shard(2 if by_channels else 0),), actual[0].placements
    for x, y in zip(actual, expected, strict=True):
        assert isinstance(x, DTensor)
        assert_close(x.full_tensor(), y, 2e-6)


def check_shards_of_time(operation, variant):
    """Checks tensors whose tokens are split."""
    tensors, options, tokens, weights = draw(operation, variant)
    expected = differentiate(operation, tensors, options | tokens, weights, output_and_state_loss)
    has_time = {name: t.shape[:2] == (B, T) for name, t in tensors.items()}
    shards = {name: shard_time(t) if has_time[name] else t for name, t in tensors.items()}
    options = options | {name: shard_time(t) for name, t in tokens.items()}

    def loss(output, state):
        is_last = dist.get_rank() == dist.get_world_size() - 1
        return output_and_state_loss(output, state if is_last else None)

    with sequence_parallel():
        output, *gradients = differentiate(operation, shards, options, shard_time(weights), loss)
    assert_close(gather_time(output), expected[0], 5e-6)
    for gradient, name, y in zip(gradients, shards, expected[1:], strict=True):
        gradient = torch.zeros_like(shards[name]) if gradient is None else gradient
        if has_time[name]:
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
