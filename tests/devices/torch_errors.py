"""Asserts that training which several processes do not support raises an error with its remedy."""

import keras
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DistributedDataParallel

from keras_recurrent.devices.torch_modules import TorchModule
from tests.models.tiny import tiny_causal_lm

TOKENS = np.arange(10).reshape(2, 5)
X = {"token_ids": TOKENS, "padding_mask": np.ones_like(TOKENS)}


def fit(model):
    model.compile("adam", model.loss)
    model.fit(X, TOKENS, verbose=0)


def fit_next_to_wrapper(model):
    DistributedDataParallel(model)
    fit(model)


def train_on_batch(model):
    model.compile("adam", model.loss)
    model.train_on_batch(X, TOKENS)


def fit_backbone(model):
    model.backbone.compile("adam", "mse")
    model.backbone.fit(X, np.zeros((2, 5, 16)), verbose=0)


def shard_block(model):
    fully_shard(model.backbone.transformer_layers[0])
    model(X)


def read_sharded_weights(model):
    module = fully_shard(TorchModule(model))
    module(X).sum().backward()
    model.get_weights()


def shard_two_dtypes(model):
    fully_shard(TorchModule(tiny_causal_lm(family="hgrn2", dtype="bfloat16")))(X)


def shard_two_dtypes_with_tensor_parallelism(model):
    module = TorchModule(tiny_causal_lm(family="hgrn2", dtype="bfloat16"))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    distribute_module(module, mesh).fully_shard()


REMEDY = r".*keras_recurrent\.devices\.torch_modules\.TorchModule\(model\)"
TWO_MODELS = "`fit` would train 2 different models" + REMEDY
NO_HOOKS = "a Keras layer. Keras calls layers without torch's hooks" + REMEDY
MESSAGES = {
    fit: TWO_MODELS,
    fit_next_to_wrapper: TWO_MODELS,
    train_on_batch: TWO_MODELS,
    fit_backbone: TWO_MODELS,
    lambda model: fully_shard(model)(X): NO_HOOKS,
    shard_block: NO_HOOKS,
    read_sharded_weights: r"\.numpy\(\) is not supported",  # torch's message
    shard_two_dtypes: r"Call `module\.fully_shard\(\)`",
    shard_two_dtypes_with_tensor_parallelism: (
        r"`DTensor`s already with weights of several dtypes, torch\.bfloat16"
    ),
}


def check(rank, processes, folder):
    for call, message in MESSAGES.items():
        keras.utils.set_random_seed(0)
        # `match` also searches the notes of an error.
        with pytest.raises(Exception, match=f"(?s){message}"):
            call(tiny_causal_lm(family="hgrn2"))
        dist.barrier()
    module = TorchModule(tiny_causal_lm(family="hgrn2"))
    module.model.evaluate(X, TOKENS, verbose=0)  # evaluation is supported
    assert torch.isfinite(module(X)).all()
