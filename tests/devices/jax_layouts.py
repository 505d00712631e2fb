"""Asserts that a model on a mesh of eight simulated devices matches the same model on one.

Arguments: the folder into which XLA dumps the programs that it compiles, and a case such as
`griffin:2,4` or `griffin:2,4:8`: a family, the sizes of the mesh for batch and model, or for batch,
sequence and model, and the number of key and value heads.
"""

import math
import pathlib
import sys

import keras
import numpy as np

from keras_recurrent.models import memory_sizes, training_sizes
from tests.devices.meshes import device_mesh, model_parallel
from tests.devices.programs import collectives
from tests.models.tiny import FAMILIES, set_weights

PROGRAMS = "*train_step*after_optimizations.txt"
BATCH, LENGTH = 16, 24  # no weight has these sizes
MAX_STATE_BYTES = 16_384  # of a device's sequences; their hidden states have 49,152 bytes
COMMON = {"num_layers": 2, "vocabulary_size": 160, "hidden_dim": 32, "intermediate_dim": 64}
SIZES = {
    "griffin": {
        **COMMON,
        "block_types": ("recurrent", "local_attention"),
        "lru_width": 64,
        "num_blocks": 8,
        "num_query_heads": 8,
        "head_dim": 8,
        "sliding_window": 6,
    },
    "hgrn2": {**COMMON, "expand_ratio": 4},
    "transnormer": {**COMMON, "num_heads": 8, "head_dim": 4},
    "lightning_hybrid": {
        **COMMON,
        "block_types": ("lightning_attention", "global_attention"),
        "num_query_heads": 8,
        "head_dim": 4,
    },
    "mamba_hybrid": {
        **COMMON,
        "block_types": ("mamba", "attention"),
        "use_mlp": True,
        "num_mamba_heads": 8,
        "mamba_head_dim": 4,
        "mamba_state_dim": 4,
        "num_query_heads": 8,
        "head_dim": 4,
    },
    "lfm2": {
        **COMMON,
        "block_types": ("gated_short_conv", "global_attention"),
        "num_query_heads": 8,
        "head_dim": 4,
    },
}


def make_model(family, **sizes):
    row = FAMILIES[family]
    model = row.causal_lm(row.backbone(**{**SIZES[family], **sizes}))
    set_weights(model, seed=0)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, model.loss, weighted_metrics=[], sampler="greedy")
    return model


def training_batch():
    """Packed documents with padding at the end: inputs, labels and sample weights."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, COMMON["vocabulary_size"], (BATCH, LENGTH + 1)).astype("int32")
    mask = (np.arange(LENGTH) < rng.integers(LENGTH // 2, LENGTH, (BATCH, 1))).astype("int32")
    x = {"token_ids": tokens[:, :-1], "padding_mask": mask}
    x["segment_ids"] = np.sort(rng.integers(3, size=(BATCH, LENGTH)).astype("int32"))
    return x, tokens[:, 1:], mask


def generate(model, batch_size, lengths):
    """Greedy continuations of the first sequences, which begin with prompts of these lengths."""
    token_ids = training_batch()[0]["token_ids"][:batch_size]
    mask = (np.arange(LENGTH) < lengths)[:batch_size]
    output = model.generate({"token_ids": token_ids, "padding_mask": mask}, stop_token_ids=None)
    return np.asarray(output["token_ids"])


def train_and_generate(model):
    """Losses of two steps, weights and slots after them, and generated tokens."""
    x, y, weight = training_batch()
    options = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
    losses = model.fit(x, y, sample_weight=weight, **options).history["loss"]
    variables = (*model.weights, *model.optimizer.variables)
    arrays = [(v.path, np.asarray(v.value)) for v in variables]
    lengths = np.arange(BATCH)[:, None] % 6 + LENGTH - 12
    # The devices do not divide a batch of one.
    tokens = [generate(model, batch_size, lengths) for batch_size in (BATCH, 1)]
    return losses, arrays, np.concatenate(tokens)


def is_expected(message, sizes, family, kv_heads):
    """Returns True if a training step must send this message between devices.

    Expected are weights and their gradients, or a device's part of activations, outside loops.
    Embeddings are looked up on the devices that have their columns, then sent to those that have
    their sequences. If tokens of a sequence are on several devices, states are sent to the right.
    """
    if message.in_loop:
        return False
    rows, tokens = BATCH // sizes["batch"], LENGTH // sizes.get("sequence", 1)
    width, size = COMMON["hidden_dim"], math.prod(message.shape)
    weight_size = COMMON["vocabulary_size"] * width // sizes["model"]
    if "token_embedding" in message.operation and "/jit(_take)/" in message.operation:
        return size <= max(rows * tokens * width, weight_size)
    if message.kind == "collective-permute" and "/shard_map/ppermute" in message.operation:
        return message.nbytes <= MAX_STATE_BYTES
    activation_sizes = {LENGTH, rows * LENGTH, rows * tokens}
    if not activation_sizes & {*message.shape} and message.shape[1:2] != (tokens,):
        return message.kind != "all-to-all" and size <= weight_size
    shapes = {(rows, tokens), (rows, tokens, 1), (rows, tokens, width), (rows * tokens, width)}
    shapes |= {(rows, LENGTH), (rows, LENGTH, 1)}  # kinds and positions of tokens
    shapes.add((rows, tokens, sizes["model"]))  # the largest logit of each part of the vocabulary
    if "num_query_heads" in SIZES[family]:
        heads, head_dim = SIZES[family]["num_query_heads"], SIZES[family]["head_dim"]
        if kv_heads % sizes["model"]:  # gradients of keys and values that devices share
            shapes.add((rows, tokens, kv_heads, head_dim))
            if kv_heads > 1:  # their queries are gathered, too
                shapes.add((rows, tokens, heads, head_dim))
    if family == "mamba_hybrid":  # keys and queries of the group that devices share; gradients
        size = SIZES[family]["mamba_state_dim"]
        shapes |= {(rows, tokens, 2 * size), (rows, tokens, 1, size)}
    return message.kind in ("all-reduce", "all-gather") and message.shape in shapes


def compare(dump, family, sizes, kv_heads="1"):
    """Returns the shapes of a device's part of each state."""
    kv_heads, sizes = int(kv_heads), tuple(map(int, sizes.split(",")))
    heads = {"num_key_value_heads": kv_heads} if family == "griffin" else {}
    losses_of_one, arrays_of_one, tokens_of_one = train_and_generate(make_model(family, **heads))
    before = set(dump.glob(PROGRAMS))
    mesh = device_mesh(*sizes)
    layout = {"attention_layers": [1]} if family == "lightning_hybrid" else heads
    layout_map = FAMILIES[family].backbone.get_layout_map(mesh, **layout)
    with model_parallel(layout_map):
        model = make_model(family, **heads)
        losses, arrays, tokens = train_and_generate(model)
        state = model.backbone.get_initial_state(BATCH, LENGTH)
    (program,) = set(dump.glob(PROGRAMS)) - before
    axes = dict(zip(mesh.axis_names, sizes, strict=True))
    messages = collectives(program.read_text())
    assert [m for m in messages if not is_expected(m, axes, family, kv_heads)] == []
    np.testing.assert_allclose(losses, losses_of_one, rtol=2e-6)
    for (path, array), (_, expected) in zip(arrays, arrays_of_one, strict=True):
        np.testing.assert_allclose(array, expected, rtol=0, atol=1e-6, err_msg=path)
    np.testing.assert_array_equal(tokens, tokens_of_one)
    assert device_bytes(model, state) == computed_bytes(model, layout_map)
    return {
        path[-1]: array.sharding.shard_shape(array.shape)
        for path, array in keras.tree.flatten_with_path(state)
    }


def device_bytes(model, state):
    """Bytes on one device; SGD with momentum has a slot for each weight."""
    arrays = {
        "parameters": [weight.value for weight in model.weights],
        "slots": [v.value for v in model.optimizer.variables if v.path.endswith("momentum")],
        "cache": keras.tree.flatten(state),
    }
    return {
        name: sum(array.addressable_shards[0].data.nbytes for array in group)
        for name, group in arrays.items()
    }


def computed_bytes(model, layout_map):
    """Bytes on one device by `training_sizes` and `memory_sizes`; gradients equal the slots."""
    training = training_sizes(model, num_slots=1, layout_map=layout_map)
    assert training.gradients == training.slots
    cache = memory_sizes(model, BATCH, LENGTH, layout_map=layout_map).cache
    return {"parameters": training.parameters, "slots": training.slots, "cache": cache}


# {case: shapes of a device's part of some states}
STATES: dict = {
    "griffin:2,2,2": {"hidden": (8, 32), "inputs": (8, 3, 32), "key": (8, 5, 1, 8)},
    "griffin:4,2:2": {"key": (4, 5, 1, 8)},
    "lfm2:2,4": {"inputs": (8, 2, 8)},
    **{
        f"{family}:2,4": {"memory": (8, 2, 4, 4)}
        for family in ("hgrn2", "transnormer", "lightning_hybrid", "mamba_hybrid")
    },
}


def main(dump, case):
    states = compare(pathlib.Path(dump), *case.split(":"))
    assert states.items() >= STATES.get(case, {}).items(), states


if __name__ == "__main__":
    main(*sys.argv[1:])
