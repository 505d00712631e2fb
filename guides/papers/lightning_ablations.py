"""Ablations of TransNormerLLM: gate, decay, positions, norms, activations.

    make paper-lightning_ablations            # minutes; or, with the package installed:
    KERAS_BACKEND=jax python guides/papers/lightning_ablations.py
    KERAS_BACKEND=jax python guides/papers/lightning_ablations.py --full --text FILE  # on a GPU

Qin et al. 2024 (arXiv:2405.17381, section 5.3) remove or replace one part of their model at a time.
The gate lowers the loss from 2.263 to 2.248. LRPE with decay in every layer is best; LRPE in the
first layer only, as released, is hardly worse. A decay that differs by layer lowers the perplexity.
Norms and activations matter little.

The released model uses the package's layers. LRPE and the activations of queries, keys and gates
are arguments of `LightningAttention`. Variants without a published model (no gate, no decay, other
norms) are subclasses in this script.
"""

import dataclasses
import os
import pathlib
import time
from typing import Any

# Keras reads this once, at import. "torch" and "tensorflow" also work.
os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
import matplotlib.figure
import numpy as np
from keras import ops
from runs import (
    PASSES,
    Results,
    command_line,
    deviations,
    machine,
    picture,
    read_command_line,
    read_text,
    spread,
    table,
    text_batches,
    with_error,
)
from training import token_losses, train

from keras_recurrent.layers import LightningAttention, RMSNorm, SimpleRMSNorm
from keras_recurrent.layers.gated_linear_unit import GatedLinearUnit
from keras_recurrent.layers.lightning_attention import alibi_slopes
from keras_recurrent.layers.reversible_embedding import reversible_embedding
from keras_recurrent.models import TransNormerResidualBlock
from keras_recurrent.models.recurrent_backbone import RecurrentBackbone
from keras_recurrent.models.recurrent_causal_lm import RecurrentCausalLM

RELEASED = "as released"


@dataclasses.dataclass(frozen=True)
class Variant:
    """A variant of the model; the defaults are the released one."""

    lrpe: str = "first"  # layers with LRPE: "first", "all" or "none"
    decay: str = "by layer"  # "by layer", "alike" in all layers, or "none"
    gate: str | None = "linear"  # the gate's activation; None removes the gate
    feature: Any = "silu"  # activation of queries and keys
    unit: str = "linear"  # activation of the gated linear unit
    norm: type = SimpleRMSNorm


def one_and_elu(x):
    return 1 + ops.elu(x)


VARIANTS = {
    RELEASED: Variant(),
    "no gate": Variant(gate=None),
    "sigmoid gate": Variant(gate="sigmoid"),
    "LRPE in all layers": Variant(lrpe="all"),
    "decay alone": Variant(lrpe="none"),
    "LRPE alone": Variant(lrpe="all", decay="none"),
    "no decay": Variant(decay="none"),
    "no positions, no decay": Variant(lrpe="none", decay="none"),
    "decays alike in all layers": Variant(decay="alike"),
    "RMSNorm": Variant(norm=RMSNorm),
    "LayerNorm": Variant(norm=keras.layers.LayerNormalization),
    "1 + elu for queries, keys": Variant(feature=one_and_elu),
    "silu in the gated unit": Variant(unit="silu"),
}
# The paper's result for each variant, compared with the released model.
PAPER = {
    "no gate": "worse: 2.263, not 2.248",
    "LRPE in all layers": "a little better",
    "decay alone": "worse",
    "LRPE alone": "worse",
    "decays alike in all layers": "worse",
    "RMSNorm": "little difference",
    "LayerNorm": "little difference",
    "1 + elu for queries, keys": "alike",
    "silu in the gated unit": "little effect",
}


@dataclasses.dataclass
class Size:
    """Sizes of a run; lengths are bytes."""

    width: int
    num_heads: int
    num_layers: int
    length: int  # of training and test sequences
    tokens: int  # per step
    steps: int  # at most two passes over the text
    windows: int
    learning_rate: float


MINIATURE = Size(32, 4, 3, 256, 2048, 150, 64, 5e-3)
FULL = Size(256, 4, 6, 1024, 8192, 1000, 256, 2e-3)


# --- 1. The variants ---


class Attention(LightningAttention):
    """Lightning Attention with a variant's decay, gate and norm."""

    def __init__(self, variant, num_heads, head_dim, **kwargs):
        gate = variant.gate or "linear"
        super().__init__(num_heads, head_dim=head_dim, gate_activation=gate, **kwargs)
        if variant.decay == "none":
            self.log_decay = (0.0,) * self.num_heads
        if variant.decay == "alike":  # the first layer's, in all of them
            self.log_decay = tuple(-slope for slope in alibi_slopes(self.num_heads))
        self.norm = variant.norm(epsilon=1e-6, name="norm")
        if variant.gate is None:
            self.u_proj = keras.layers.Identity(name="u_proj")  # no weights
        self.has_gate = variant.gate is not None

    def finish(self, output, inputs):
        if self.has_gate:
            return super().finish(output, inputs)
        o = ops.reshape(output, (*ops.shape(output)[:2], self.num_heads * self.head_dim))
        return self.o_proj(self.norm(o))


class GatedUnit(GatedLinearUnit):
    """SGLU with an activation of its gate."""

    use_bias = False

    def __init__(self, activation, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.activation = keras.activations.get(activation)

    def gated(self, gate, x):
        return self.activation(gate) * x


class Block(TransNormerResidualBlock):
    def __init__(self, variant, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.variant = variant

    def make_norm(self, name):
        return self.variant.norm(epsilon=self.layer_norm_epsilon, name=name)

    def make_mlp(self, name):
        if self.variant.unit == "linear":
            return super().make_mlp(name)
        return GatedUnit(self.variant.unit, self.intermediate_dim, name=name)


class LanguageModel(RecurrentCausalLM):
    backbone_cls = RecurrentBackbone


def build(variant, size, seed):
    """Builds a `TransNormerCausalLM` with a variant's parts."""
    keras.utils.set_random_seed(seed)
    blocks = [
        Block(
            variant,
            Attention(
                variant,
                size.num_heads,
                head_dim=size.width // size.num_heads,
                layer_index=i,
                num_layers=size.num_layers,
                use_lrpe=variant.lrpe == "all" or (variant.lrpe == "first" and i == 0),
                query_key_activation=variant.feature,
                name="temporal_block",
            ),
            11 * size.width // 4,
            name=f"block_{i}",
        )
        for i in range(size.num_layers)
    ]
    backbone = RecurrentBackbone(
        reversible_embedding(256, size.width, False),
        blocks,
        variant.norm(epsilon=1e-6, name="final_norm"),
        embedding_scale=size.width**0.5,
    )
    backbone.vocabulary_size = 256
    return LanguageModel(backbone)


# --- 2. Training and testing ---


def run(name, size, seeds, training, windows):
    """Trains the seeds of one variant in parallel and yields a line of results for each."""
    steps = min(size.steps, PASSES * len(training) // size.tokens)
    models = [build(VARIANTS[name], size, seed) for seed in seeds]
    optimizer = keras.optimizers.AdamW(
        keras.optimizers.schedules.CosineDecay(
            0.0, steps, alpha=0.1, warmup_target=size.learning_rate, warmup_steps=steps // 10
        ),
        weight_decay=0.01,
        global_clipnorm=1.0,
    )
    start = time.perf_counter()
    rows = text_batches(training, seeds, steps, size.length, size.tokens)
    trained = train(models, optimizer, rows)
    seconds = time.perf_counter() - start
    test = token_losses(models[0])
    for seed, model, loss in zip(seeds, models, trained, strict=True):
        yield {
            "variant": name,
            "seed": seed,
            "width": size.width,
            "parameters": model.count_params(),
            "steps": steps,
            "bytes": steps * size.tokens,
            "training_loss": round(loss, 4),
            "loss": round(float(test(model, windows).mean()), 4),
            "seconds_of_all_seeds": round(seconds, 1),
            "machine": machine(),
        }


# --- 3. Results ---


def losses(results, size, name):
    """Returns `{seed: loss}`, sorted by seed."""
    lines = results.select(variant=name, width=size.width)
    return {line["seed"]: line["loss"] for line in sorted(lines, key=lambda line: line["seed"])}


def differences(results, size, name):
    """Returns, per seed, the loss minus that of the released model."""
    found, base = losses(results, size, name), losses(results, size, RELEASED)
    return np.array([found[seed] - base[seed] for seed in found if seed in base])


def judge(found):
    """Formats the verdict: differences count if they exceed two of their deviations."""
    if len(found) < 2:
        return "one seed"
    if abs(np.mean(found)) <= 2 * deviations(found):
        return "within 2 deviations"
    return "worse" if np.mean(found) > 0 else "better"


def tell(results, size):
    rows = []
    for name in VARIANTS:
        if not losses(results, size, name):
            continue
        (parameters,) = {
            line["parameters"] for line in results.select(variant=name, width=size.width)
        }
        found = differences(results, size, name)
        last = ("", "") if name == RELEASED else (with_error(found, 4), judge(found))
        loss = with_error(list(losses(results, size, name).values()), 4)
        rows.append((name, f"{parameters:,}", loss, *last, PAPER.get(name, "")))
    header = ("variant", "weights", "loss, held out", "less released", "", "the paper")
    return table(header, rows)


def draw(results, size, path):
    figure = matplotlib.figure.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    names = [name for name in VARIANTS if name != RELEASED and losses(results, size, name)]
    for place, name in enumerate(names):
        found = differences(results, size, name)
        error = 2 * deviations(found)
        axes.errorbar(np.mean(found), place, xerr=error, fmt="o", color="tab:blue", capsize=3)
        axes.plot(found, np.full(len(found), place), "|", color="gray")
    axes.axvline(0, color="black", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(
        "increase of the loss over the released model, nats per byte; bars: two standard deviations"
    )
    figure.savefig(path, dpi=120)


# --- 4. Main program ---


def main():
    parser = command_line(__doc__, MINIATURE, FULL)
    parser.add_argument("--text", type=pathlib.Path, help="a file; else Python's documentation")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.set_defaults(seeds=None)  # three, or five with --full
    arguments, size = read_command_line(parser, MINIATURE, FULL)
    seeds = arguments.seeds or list(range(5 if arguments.full else 3))
    training, held_out = read_text(arguments.text)
    windows = spread(held_out, size.windows, size.length, size.length)
    results = Results(arguments.output / "lightning_ablations.jsonl")
    print(f"{len(training):,} bytes to train on, {len(held_out):,} held out, on {machine()}")
    for name in dict.fromkeys((RELEASED, *arguments.variants)):
        missing = results.missing(seeds, variant=name, width=size.width)
        for line in run(name, size, missing, training, windows) if missing else ():
            results.append(**line)
            print(
                f"{name}, seed {line['seed']}: {line['loss']}; {line['seconds_of_all_seeds']} s",
                flush=True,
            )
    draw(results, size, picture(arguments, "lightning_ablations"))
    print(tell(results, size))


if __name__ == "__main__":
    main()
