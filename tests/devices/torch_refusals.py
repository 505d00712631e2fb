"""What is refused where torch has several processes."""

import keras
import numpy as np
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


def fit_beside_a_wrapper(model):
    DistributedDataParallel(model)
    fit(model)


def train_on_batch(model):
    model.compile("adam", model.loss)
    model.train_on_batch(X, TOKENS)


def fit_a_backbone(model):
    model.backbone.compile("adam", "mse")
    model.backbone.fit(X, np.zeros((2, 5, 16)), verbose=0)


def fully_shard_the_model(model):
    fully_shard(model)(X)


def fully_shard_a_block(model):
    fully_shard(model.backbone.transformer_layers[0])
    model(X)


def weights_of_shards(model):
    module = fully_shard(TorchModule(model))
    module(X).sum().backward()
    model.get_weights()


def shard_two_dtypes(model):
    module = TorchModule(tiny_causal_lm(family="hgrn2", dtype="bfloat16"))
    fully_shard(module)(X)


def shard_two_dtypes_of_tensor_parallelism(model):
    module = TorchModule(tiny_causal_lm(family="hgrn2", dtype="bfloat16"))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    distribute_module(module, mesh).fully_shard()


WAYS = (
    *(fit, fit_beside_a_wrapper, train_on_batch, fit_a_backbone),
    *(fully_shard_the_model, fully_shard_a_block, weights_of_shards),
    *(shard_two_dtypes, shard_two_dtypes_of_tensor_parallelism),
)


def compare(case, rank, processes, folder):
    """The errors of all ways."""
    found = {}
    for way in WAYS:
        keras.utils.set_random_seed(0)
        try:
            way(tiny_causal_lm(family="hgrn2"))
        except Exception as error:
            notes = "".join(getattr(error, "__notes__", ()))
            found[way.__name__] = f"{type(error).__name__}: {error}{notes}"
        else:
            found[way.__name__] = "no error"
        dist.barrier()
    module = TorchModule(tiny_causal_lm(family="hgrn2"))
    module.model.evaluate(X, TOKENS, verbose=0)  # trains nothing
    assert torch.isfinite(module(X)).all()
    return found
