"""Asserts that networks whose sequences are split over processes match whole sequences."""

import contextlib

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from keras_recurrent import layers, ops
from keras_recurrent.devices.torch_modules import TorchModule
from keras_recurrent.devices.torch_sequence import sequence_parallel
from tests.devices.torch_operations import B, T, shard_time
from tests.models.tiny import VOCABULARY, tiny_causal_lm

# Blocks without attention to all tokens, which shards of time do not support.
BLOCK_TYPES = {
    "griffin": ("recurrent", "local_attention"),
    "lightning_hybrid": ("lightning_attention",),
    "mamba_hybrid": ("mamba", "mlp"),
    "lfm2": ("gated_short_conv",),
}


def training_batch():
    """Packed documents, with padding between real tokens: inputs, labels and sample weights."""
    rng = np.random.default_rng(0)
    tokens = torch.tensor(rng.integers(VOCABULARY, size=(B, T + 1)))
    real = torch.ones((B, T), dtype=torch.int32)
    real[0, 5:9] = 0
    segment_ids = torch.tensor(np.sort(rng.integers(3, size=(B, T)), axis=1))
    x = {"token_ids": tokens[:, :-1], "padding_mask": real, "segment_ids": segment_ids}
    return x, tokens[:, 1:], real


def train(family, is_split):
    """Returns the losses of three steps, and the weights after them."""
    kinds = {"block_types": BLOCK_TYPES[family]} if family in BLOCK_TYPES else {}
    model = tiny_causal_lm(family=family, **kinds)
    module = TorchModule(model)
    parallel = DistributedDataParallel(module) if is_split else module
    x, y, weight = training_batch()
    if is_split:
        x = {name: shard_time(tensor) for name, tensor in x.items()}
        y, weight = shard_time(y), shard_time(weight)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        with sequence_parallel() if is_split else contextlib.nullcontext():
            loss = model.loss(y, parallel(x), weight)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    if is_split:
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
    return [losses, *(p.detach() for p in module.parameters())]


def check_errors():
    """Unsupported options raise errors that name them."""
    x, ids = torch.ones(B, 6, 4), torch.zeros((B, 6), dtype=torch.int32)
    q = torch.ones(B, 6, 1, 2)
    prompt = {"token_ids": np.ones((1, 8), "int32"), "padding_mask": np.array([[1] * 3 + [0] * 5])}
    model = tiny_causal_lm()

    def rg_lru(mask=None, **options):
        return layers.RGLRU(num_blocks=2, **options)(x, mask=mask)

    calls = {
        "`reverse=True`": lambda: ops.linear_scan(x, -x, reverse=True),
        "no `sliding_window`": lambda: ops.sliding_window_attention(q, q, q),
        "`return_sequences=False`": lambda: rg_lru(return_sequences=False),
        "`go_backwards=True`": lambda: rg_lru(go_backwards=True),
        "`zero_output_for_mask=False`": lambda: rg_lru(ids == 0, zero_output_for_mask=False),
        "A state of a layer": lambda: rg_lru(return_state=True),
        "A state of a layer or network": lambda: model.generate(prompt, stop_token_ids=None),
    }
    for name, call in calls.items():
        with sequence_parallel(), pytest.raises(Exception, match="inside `sequence_parallel`") as e:
            call()
        assert name in str(e.value)


def check(case, rank, processes, folder):
    """`case` is a family or "errors"."""
    if case == "errors":
        return check_errors()
    for a, b in zip(train(case, is_split=True), train(case, is_split=False), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=5e-6)
