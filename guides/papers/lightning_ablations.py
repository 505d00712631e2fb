"""Ablations of TransNormerLLM: gate, decay, positions, norms, activations (TNL, section 5.3).

One part of the released model is removed or replaced at a time. LRPE and the activations of
queries, keys and gates are arguments of `LightningAttention`. Variants without a published model
(no gate, no decay, other norms) are subclasses in this script.
"""

import dataclasses
from typing import Any

import keras
import numpy as np
from keras import ops
from runs import deviations, mean_with_error, read_text, spread, table
from training import token_losses, train_on_text

from keras_recurrent.layers import LightningAttention, RMSNorm, SimpleRMSNorm
from keras_recurrent.layers.gated_linear_unit import GatedLinearUnit
from keras_recurrent.layers.lightning_attention import alibi_slopes
from keras_recurrent.layers.reversible_embedding import reversible_embedding
from keras_recurrent.models import TransNormerResidualBlock
from keras_recurrent.models.recurrent_backbone import RecurrentBackbone
from keras_recurrent.models.recurrent_causal_lm import RecurrentCausalLM

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


def prepare(size, text):
    training, held_out = read_text(text)
    return training, spread(held_out, size.windows, size.length, size.length)


def runs(size, results):
    return ({"variant": name, "width": size.width} for name in VARIANTS)


def measure(key, seeds, size, data):
    training, windows = data
    models = [build(VARIANTS[key["variant"]], size, seed) for seed in seeds]
    lines, test = train_on_text(models, seeds, training, size, size.length), token_losses(models[0])
    for line, model in zip(lines, models, strict=True):
        line["loss"] = round(float(test(model, windows).mean()), 4)
    return lines


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


@dataclasses.dataclass
class Differences:
    """A plot and a table of losses compared with the released model, by variant."""

    results: Any
    size: Any

    def draw(self, axes):
        found = {name: differences(self.results, self.size, name) for name in VARIANTS}
        found = {n: values for n, values in found.items() if len(values) and n != RELEASED}
        for place, values in enumerate(found.values()):
            error = 2 * deviations(values)
            axes.errorbar(np.mean(values), place, xerr=error, fmt="o", color="tab:blue", capsize=3)
        axes.axvline(0, color="black", linewidth=1)
        axes.set_yticks(range(len(found)), found)
        axes.invert_yaxis()
        axes.set_xlabel("loss minus the released model's; ± two standard deviations")

    def table(self):
        rows = []
        for name in VARIANTS:
            loss = list(losses(self.results, self.size, name).values())
            found = differences(self.results, self.size, name)
            if len(found):
                last = ("", "") if name == RELEASED else (mean_with_error(found, 4), judge(found))
                rows.append((name, mean_with_error(loss, 4), *last, PAPER.get(name, "")))
        return table(("variant", "loss, held out", "minus released", "", "the paper"), rows)


def panels(results, size):
    return [Differences(results, size)]
