"""Whole models on a CUDA GPU: `python -m benchmarks.gpu_models > benchmarks/results/gpu_models.md`.

Arguments, `hgrn2` or `recurrentgemma`, choose one model; without any, both are measured. A training
step (forward, backward and update) of HGRN2 is compared with flash-linear-attention's and of
RecurrentGemma with transformers' (`pip install flash-linear-attention transformers`): models of the
same sizes in bfloat16, freshly initialised, on the same tokens. Each is updated by the AdamW of its
users, that of Keras or torch's own, fused, with slots in bfloat16.
"""

import datetime
import gc
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import torch

from benchmarks import peers
from keras_recurrent.models import GriffinCausalLM, HGRN2CausalLM, TokenCrossentropy

RUNS = 3
HGRN2 = {"batch": 8, "length": 2048, "repeats": 10}
# A step of the peer takes 12 seconds.
GEMMA = {"batch": 1, "length": 2048, "repeats": 1}


def ours(family, preset):
    return family.from_preset(preset, load_weights=False, preprocessor=None, dtype="bfloat16")


def our_loss(model):
    compute = TokenCrossentropy()

    def loss(token_ids):
        mask = torch.ones_like(token_ids, dtype=torch.bool)
        logits = model({"token_ids": token_ids, "padding_mask": mask}, training=True)
        # No token follows the last one of a row; its label, the first token, changes no timing.
        return compute(token_ids.roll(-1, 1), logits)

    return loss


def fla_hgrn2(sizes):
    """flash-linear-attention's HGRN2 of the same sizes."""
    from fla.models import HGRN2Config, HGRN2ForCausalLM

    config = HGRN2Config(
        hidden_size=sizes["hidden_dim"],
        num_hidden_layers=sizes["num_layers"],
        expand_ratio=sizes["expand_ratio"],
        intermediate_size=sizes["intermediate_dim"],
        vocab_size=sizes["vocabulary_size"],
        tie_word_embeddings=False,
        use_cache=False,
    )
    return HGRN2ForCausalLM(config).to("cuda", torch.bfloat16).train()


def transformers_gemma(sizes):
    """transformers' RecurrentGemma of the same sizes, which are not those of its defaults."""
    import transformers

    config = transformers.RecurrentGemmaConfig(
        num_hidden_layers=sizes["num_layers"],
        vocab_size=sizes["vocabulary_size"],
        hidden_size=sizes["hidden_dim"],
        lru_width=sizes["lru_width"],
        num_attention_heads=sizes["num_query_heads"],
        num_key_value_heads=sizes["num_key_value_heads"],
        intermediate_size=2 * sizes["intermediate_dim"],
        attention_window_size=sizes["sliding_window"],
        use_cache=False,
    )
    return transformers.RecurrentGemmaForCausalLM(config).to("cuda", torch.bfloat16).train()


def their_loss(model):
    return lambda token_ids: model(input_ids=token_ids, labels=token_ids).loss


def weights_of(model):
    if isinstance(model, keras.Model):
        return [v.value for v in model.trainable_variables]
    return list(model.parameters())


def update_of(model):
    """A function that updates the weights by their gradients."""
    weights = weights_of(model)
    if not isinstance(model, keras.Model):
        return torch.optim.AdamW(weights, lr=1e-5, fused=True).step
    optimizer = keras.optimizers.AdamW(1e-5)
    optimizer.build(model.trainable_variables)

    def update():
        with torch.no_grad():
            optimizer.apply([weight.grad for weight in weights])

    return update


def count(model):
    return sum(weight.numel() for weight in weights_of(model))


def measure(name, model, loss, vocabulary, *, batch, length, repeats):
    token_ids = torch.randint(vocabulary, (batch, length), device="cuda")
    weights, update = weights_of(model), update_of(model)

    def step():
        for weight in weights:
            weight.grad = None
        loss(token_ids).backward()
        update()

    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    speeds = []
    for _ in range(RUNS):
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
        speeds.append(repeats * batch * length / (time.perf_counter() - start))
    peak = torch.cuda.max_memory_allocated() / 2**30
    cells = (
        name,
        f"{count(model):,}",
        f"{batch}×{length}",
        f"{min(speeds):,.0f} to {max(speeds):,.0f}",
        f"{peak:.1f}",
        f"{first:.1f}",
    )
    print(f"| {' | '.join(cells)} |", flush=True)


class Pair(NamedTuple):
    """Our model, a peer of the same sizes, and the batches on which both are measured."""

    name: str
    family: type
    preset: str
    peer: str
    make_peer: Callable  # takes the configuration of our backbone
    work: dict


MODELS = {
    "hgrn2": Pair(
        *("HGRN2 1.3B", HGRN2CausalLM, "hgrn2_1.3b_100b"),
        *("flash-linear-attention", fla_hgrn2, HGRN2),
    ),
    "recurrentgemma": Pair(
        *("RecurrentGemma 2B", GriffinCausalLM, "recurrentgemma_2b"),
        *("transformers", transformers_gemma, GEMMA),
    ),
}


def compare(pair):
    """Measures one after the other; neither is in memory while the other is measured."""
    model = ours(pair.family, pair.preset)
    sizes = model.backbone.get_config()
    vocabulary = sizes["vocabulary_size"]
    measure(pair.name, model, our_loss(model), vocabulary, **pair.work)
    parameters = count(model)
    del model
    release()
    peer = pair.make_peer(sizes)
    if count(peer) != parameters:
        sys.exit(f"{pair.peer}: {count(peer):,} parameters, not the {parameters:,} of ours")
    measure(pair.peer, peer, their_loss(peer), vocabulary, **pair.work)


def release():
    """Frees memory. A Keras model has reference cycles, which only the garbage collector frees."""
    gc.collect()
    torch.cuda.empty_cache()


def main(names):
    unknown = set(names) - set(MODELS)
    if unknown:
        sys.exit(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    peers.compile_side_by_side()
    packages = ("torch", "triton", "flash-linear-attention", "transformers", "keras")
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in packages)
    print(f"# Whole models on a GPU\n\n{torch.cuda.get_device_name()}, {datetime.date.today()}.")
    print(f"{versions}.\nForward, backward and update, bfloat16; each {RUNS} times.\n")
    print("| model | parameters | batch×length | tokens/s | peak GiB | first step s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for name in names or MODELS:
        compare(MODELS[name])
        release()


if __name__ == "__main__":
    main(sys.argv[1:])
