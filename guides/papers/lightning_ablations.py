"""Ablations of TransNormerLLM: gate, decay, positions, norms, activations (TNL, section 5.3).

One part of the released model is removed or replaced at a time. LRPE and the activations of
queries, keys and gates are arguments of `LightningAttention`. Variants without a published model
(no gate, no decay, other norms) replace attributes of the layer.
"""

import dataclasses
from typing import Any

import keras
import numpy as np
from keras import ops
from runs import Panel, deviations, mean_with_error, read_text, spread, table
from training import train_on_text

from keras_recurrent.layers import SGLU, LightningAttention, RMSNorm, SimpleRMSNorm, SwiGLU
from keras_recurrent.models import TransNormerBackbone, TransNormerCausalLM

SEEDS = 3, 5
SIZES = {  # lengths are bytes
    "width": (32, 256),
    "num_heads": (4, 4),
    "num_layers": (3, 6),
    "length": (256, 1024),  # of training and test sequences
    "tokens": (2048, 8192),  # per step
    "steps": (150, 1000),  # at most two passes over the text
    "windows": (64, 256),
    "learning_rate": (5e-3, 2e-3),
}
RELEASED = "as released"


@dataclasses.dataclass(frozen=True)
class Variant:
    """A variant of the model; the defaults are the released one."""

    paper: str = ""  # the paper's result, compared with the released model
    lrpe: str = "first"  # layers with LRPE: "first", "all" or "none"
    decay: str = "checkpoints"  # schedule; "alibi" is equal in all layers; or "none"
    gate: Any = "linear"  # the gate's activation; `ones_like` removes the gate
    feature: Any = "silu"  # activation of queries and keys
    mlp: type = SGLU
    norm: type = SimpleRMSNorm


VARIANTS = {
    RELEASED: Variant(),
    "no gate": Variant("worse: 2.263, not 2.248", gate=ops.ones_like),
    "sigmoid gate": Variant(gate="sigmoid"),
    "LRPE in all layers": Variant("a little better", lrpe="all"),
    "decay alone": Variant("worse", lrpe="none"),
    "LRPE alone": Variant("worse", lrpe="all", decay="none"),
    "no decay": Variant(decay="none"),
    "no positions, no decay": Variant(lrpe="none", decay="none"),
    "decays alike in all layers": Variant("worse", decay="alibi"),
    "RMSNorm": Variant("little difference", norm=RMSNorm),
    "LayerNorm": Variant("little difference", norm=keras.layers.LayerNormalization),
    "1 + elu for queries, keys": Variant("alike", feature=lambda x: 1 + ops.elu(x)),
    "silu in the gated unit": Variant("little effect", mlp=SwiGLU),
}


class Backbone(TransNormerBackbone):
    """The network of TransNormerLLM with the parts of a variant."""

    def __init__(self, variant, *sizes, **heads):
        self.variant = variant
        super().__init__(*sizes, **heads)

    def make_arguments(self, block_cls: Any, values):
        variant = self.variant

        class Block(block_cls):
            def make_norm(self, name):
                return variant.norm(epsilon=self.layer_norm_epsilon, name=name)

            def make_mlp(self, name):
                return variant.mlp(self.intermediate_dim, name=name)

        return super().make_arguments(Block, values)

    def make_mixer(self, i, **kwargs):
        variant = self.variant
        mixer = LightningAttention(
            self.num_heads,
            layer_index=i,
            use_lrpe=variant.lrpe == "all" or (variant.lrpe == "first" and i == 0),
            decay_schedule="alibi" if variant.decay == "none" else variant.decay,
            gate_activation=variant.gate,
            query_key_activation=variant.feature,
            **self.stored("head_dim", "num_layers"),
            **kwargs,
        )
        if variant.decay == "none":
            mixer.log_decay = (0.0,) * self.num_heads
        if variant.gate is ops.ones_like:
            mixer.u_proj = keras.layers.Identity(name="u_proj")  # no weights
        mixer.norm = variant.norm(epsilon=1e-6, name="norm")
        return mixer


def build(variant, size, seed):
    """Builds a `TransNormerCausalLM` with a variant's parts."""
    keras.utils.set_random_seed(seed)
    heads = {"num_heads": size.num_heads, "head_dim": size.width // size.num_heads}
    sizes = 256, size.num_layers, size.width, 11 * size.width // 4
    return TransNormerCausalLM(Backbone(variant, *sizes, **heads))


def prepare(size, text):
    training, held_out = read_text(text)
    return training, spread(held_out, size.windows, size.length, size.length)


def runs(size, results):
    return ({"variant": name, "width": size.width} for name in VARIANTS)


def measure(key, seeds, size, data):
    models = [build(VARIANTS[key["variant"]], size, seed) for seed in seeds]
    training = size.length, size.steps, size.tokens, size.learning_rate
    return [line for line, _ in train_on_text(models, seeds, data, *training)]


def judge(found):
    """Formats the verdict: differences count if they exceed two of their deviations."""
    if len(found) < 2:
        return "one seed"
    if abs(np.mean(found)) <= 2 * deviations(found):
        return "within 2 deviations"
    return "worse" if np.mean(found) > 0 else "better"


def panels(results, size):
    """Losses of the variants minus that of the released model with the same seed."""
    found = results.lines_by(runs(size, results), "variant", "width")
    losses = {
        name: {line["seed"]: line["loss"] for line in lines[size.width]}
        for name, lines in found.items()
    }
    curves, rows, base = {}, [], losses.get(RELEASED, {})
    for name, by_seed in losses.items():
        gaps = np.array([by_seed[seed] - base[seed] for seed in sorted(by_seed) if seed in base])
        if len(gaps):
            curves[name] = {name: gaps}
            loss = mean_with_error(list(by_seed.values()), 4)
            last = ("", "") if name == RELEASED else (mean_with_error(gaps, 4), judge(gaps))
            rows.append((name, loss, *last, VARIANTS[name].paper))
    text = table(("variant", "loss, held out", "minus released", "", "the paper"), rows)
    labels = "ablations", "", "loss minus the released model's"
    return [Panel(*labels, curves, scale="names", text=text)]
