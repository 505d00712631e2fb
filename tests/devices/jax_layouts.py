"""Models of a family on a mesh of eight simulated devices, and on one. Prints JSON.

A process of its own, for it has eight devices. Its arguments: the folder into which XLA writes the
programs that it compiles; "writes" or "trains", whether models write, too; and cases such as
`griffin:2,4` or `griffin:2,4:8`, a family, the sizes of the mesh for batch and model, or for batch,
sequence and model, and the heads of keys and values.
"""

import json
import math
import pathlib
import sys

import keras
import numpy as np

from keras_recurrent.models import memory_sizes, training_sizes
from tests.devices.programs import collectives
from tests.models.tiny import FAMILIES, set_weights

PROGRAMS = "*train_step*after_optimizations.txt"
BATCH, LENGTH = 16, 24  # no weight has these sizes
MOST_BYTES_OF_STATES = 16_384  # of a device's rows; their hidden states are 49,152 bytes
EVERY = {"vocabulary_size": 160, "hidden_dim": 32, "intermediate_dim": 64}
SIZES = {
    "griffin": {
        **EVERY,
        "num_layers": 2,
        "block_types": ("recurrent", "local_attention"),
        "lru_width": 64,
        "num_blocks": 8,
        "num_query_heads": 8,
        "head_dim": 8,
        "sliding_window": 6,
    },
    "hgrn2": {**EVERY, "num_layers": 2, "expand_ratio": 4},
    "transnormer": {**EVERY, "num_layers": 2, "num_heads": 8, "head_dim": 4},
    "lightning_hybrid": {
        **EVERY,
        "num_layers": 2,
        "block_types": ("lightning_attention", "global_attention"),
        "num_query_heads": 8,
        "head_dim": 4,
    },
}


def make(family, **sizes):
    of = FAMILIES[family]
    model = of.causal_lm(of.backbone(**{**SIZES[family], **sizes}))
    set_weights(model, seed=0)
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9), model.loss, weighted_metrics=[], sampler="greedy"
    )
    return model


def batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, EVERY["vocabulary_size"], (BATCH, LENGTH + 1)).astype("int32")
    mask = (np.arange(LENGTH) < rng.integers(LENGTH // 2, LENGTH, (BATCH, 1))).astype("int32")
    x = {"token_ids": tokens[:, :-1], "padding_mask": mask}
    x["segment_ids"] = np.sort(rng.integers(3, size=(BATCH, LENGTH)).astype("int32"))
    return x, tokens[:, 1:], mask


def observed(model, writes):
    """Losses of two steps, weights and slots after them, and tokens that it `writes` or not."""
    x, y, weight = batch()
    fit = model.fit(
        x, y, sample_weight=weight, batch_size=BATCH, epochs=2, shuffle=False, verbose=0
    )
    losses = fit.history["loss"]
    variables = (*model.weights, *model.optimizer.variables)
    arrays = [(v.path, np.asarray(v.value)) for v in variables]
    if not writes:
        return losses, arrays, x["token_ids"]
    lengths = np.arange(BATCH)[:, None] % 6 + LENGTH - 12
    prompt = {"token_ids": x["token_ids"], "padding_mask": np.arange(LENGTH) < lengths}
    # All rows, and one that the devices do not divide.
    written = [
        model.generate({name: a[:rows] for name, a in prompt.items()}, stop_token_ids=None)
        for rows in (BATCH, 1)
    ]
    return losses, arrays, np.concatenate([np.asarray(rows["token_ids"]) for rows in written])


def is_planned(sent, sizes, family, kv_heads):
    """Whether a step may send this: weights or their gradients, or a device's part of activations.

    Nothing is sent in loops. Embeddings are looked up where their columns are, then sent to where
    their rows are. Where tokens of a row are on several devices, these send states to the right.
    """
    if sent.in_loop:
        return False
    rows, tokens = BATCH // sizes["batch"], LENGTH // sizes.get("sequence", 1)
    width, size = EVERY["hidden_dim"], math.prod(sent.shape)
    of_weights = EVERY["vocabulary_size"] * width // sizes["model"]
    if "token_embedding" in sent.operation and "/jit(_take)/" in sent.operation:
        return size <= max(rows * tokens * width, of_weights)
    if sent.kind == "collective-permute" and "/shard_map/ppermute" in sent.operation:
        return sent.nbytes <= MOST_BYTES_OF_STATES
    if not {LENGTH, rows * LENGTH, rows * tokens} & {*sent.shape} and sent.shape[1:2] != (tokens,):
        return sent.kind != "all-to-all" and size <= of_weights
    allowed = {(rows, tokens), (rows, tokens, 1), (rows, tokens, width), (rows * tokens, width)}
    allowed |= {(rows, LENGTH), (rows, LENGTH, 1)}  # kinds and positions of tokens
    allowed.add((rows, tokens, sizes["model"]))  # the largest logit of each part of the vocabulary
    if "num_query_heads" in SIZES[family]:
        heads, head_dim = SIZES[family]["num_query_heads"], SIZES[family]["head_dim"]
        if kv_heads % sizes["model"]:  # gradients of keys and values that devices share
            allowed.add((rows, tokens, kv_heads, head_dim))
            if kv_heads > 1:  # their queries are gathered, too
                allowed.add((rows, tokens, heads, head_dim))
    return sent.kind in ("all-reduce", "all-gather") and sent.shape in allowed


def compare(dump, writes, family, sizes, kv_heads="1"):
    further = {"num_key_value_heads": int(kv_heads)} if family == "griffin" else {}
    expected = observed(make(family, **further), writes)
    before = set(dump.glob(PROGRAMS))
    sizes = tuple(map(int, sizes.split(",")))
    names = ("batch", "model") if len(sizes) == 2 else ("batch", "sequence", "model")
    mesh = keras.distribution.DeviceMesh(sizes, names, keras.distribution.list_devices())
    layout = {"attention_layers": [1]} if family == "lightning_hybrid" else further
    layout_map = FAMILIES[family].backbone.get_layout_map(mesh, **layout)
    with keras.distribution.ModelParallel(layout_map=layout_map).scope():
        model = make(family, **further)
        found = observed(model, writes)
        state = model.backbone.get_initial_state(BATCH, LENGTH)
    (program,) = set(dump.glob(PROGRAMS)) - before
    sent = collectives(program.read_text())
    (losses, arrays, tokens), (losses_of_one, arrays_of_one, tokens_of_one) = found, expected
    differences = [
        (float(np.abs(a - b).max()), path)
        for (path, a), (_, b) in zip(arrays, arrays_of_one, strict=True)
    ]
    return {
        "losses": float(np.abs(np.divide(losses, losses_of_one) - 1).max()),
        "arrays": max(differences),
        "same tokens": bool((tokens == tokens_of_one).all()),
        "unplanned": [
            c
            for c in sent
            if not is_planned(c, dict(zip(names, sizes, strict=True)), family, int(kv_heads))
        ],
        "bytes": on_a_device(model, state),
        "said bytes": said_bytes(model, layout_map),
        "states": {
            path[-1]: array.sharding.shard_shape(array.shape)
            for path, array in keras.tree.flatten_with_path(state)
        },
    }


def on_a_device(model, state):
    """Bytes of what lies on one device; plain SGD with momentum has a slot for each weight."""
    arrays = {
        "parameters": [weight.value for weight in model.weights],
        "slots": [v.value for v in model.optimizer.variables if v.path.endswith("momentum")],
        "cache": keras.tree.flatten(state),
    }
    return {
        name: sum(array.addressable_shards[0].data.nbytes for array in of_name)
        for name, of_name in arrays.items()
    }


def said_bytes(model, layout_map):
    """The same by arithmetic, and gradients, which are gone after a step."""
    training = training_sizes(model, num_slots=1, layout_map=layout_map)
    assert training.gradients == training.slots
    cache = memory_sizes(model, BATCH, LENGTH, layout_map=layout_map).cache
    return {"parameters": training.parameters, "slots": training.slots, "cache": cache}


def main(dump, writes, *cases):
    found = {c: compare(pathlib.Path(dump), writes == "writes", *c.split(":")) for c in cases}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
