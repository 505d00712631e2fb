"""Networks of all families in NumPy float64, on the loops over tokens of `tests.layers.loops`.

Written from the papers and what the published models compute: Griffin (arXiv:2402.19427), HGRN2
(arXiv:2404.07904), TransNormerLLM (arXiv:2307.14995), HypeNet (arXiv:2601.22156), MiniCPM-SALA
(arXiv:2602.11761), Nemotron-H (arXiv:2504.03624), Falcon-H1 (arXiv:2507.22448) and LFM2
(arXiv:2511.23404). Each document is computed alone and without padding.
"""

import functools

import numpy as np

from tests.layers import loops
from tests.layers.loops import below
from tests.models.tiny import FAMILIES, weights_of


def logits(model, token_ids, padding_mask=None, segment_ids=None):
    """Logits `[B, T, vocabulary]`, NaN at padding."""
    family = next(n for n, row in FAMILIES.items() if row.backbone is type(model.backbone))
    weights = {path: array.astype("float64") for path, array in weights_of(model).items()}
    config = model.backbone.get_config()
    output = np.full((*token_ids.shape, config["vocabulary_size"]), np.nan)
    for row, tokens in enumerate(token_ids):
        real = np.ones(len(tokens), bool) if padding_mask is None else padding_mask[row] > 0
        segments = np.zeros(len(tokens), int) if segment_ids is None else segment_ids[row]
        for segment in np.unique(segments[real]):
            places = np.flatnonzero(real & (segments == segment))
            output[row, places] = document_logits(family, weights, config, tokens[places])
    return output


def document_logits(family, weights, config, tokens):
    """Logits of one document, from weights by their paths and the backbone's configuration."""
    embeddings = weights["token_embedding/embeddings"]
    scale = config.get("residual_scale") or 1

    def norm(x, name):
        factor = weights.get(f"{name}/scale", 1) + (family == "griffin")
        return loops.norm(x, config.get("layer_norm_epsilon", 1e-6)) * factor

    x = embeddings[tokens] * (config.get("embedding_scale") or 1)
    if family == "transnormer":
        x = x * np.sqrt(config["hidden_dim"])
    for i in range(config["num_layers"]):
        w = below(weights, f"block_{i}")
        mixer = MIXERS[family](below(w, "temporal_block"), config, i, weights)
        mlp = None
        if "mlp/up_proj/kernel" in w:
            mlp = MLPS[family](below(w, "mlp"), config)
        for name, unit in (("temporal_norm", mixer), ("channel_norm", mlp)):
            if unit is not None:
                y = np.stack([unit.step(token) for token in norm(x, f"block_{i}/{name}")])
                x = x + scale * y
    x = norm(x, "final_norm") * (config.get("output_scale") or 1)
    tied = config.get("tie_word_embeddings", True)
    z = x @ (embeddings.T if tied else weights["token_embedding/reverse_embeddings"])
    cap = config.get("final_logit_soft_cap")
    return cap * np.tanh(z / cap) if cap else z


def griffin_mixer(w, config, i, weights):
    block_type = config["block_types"][i % len(config["block_types"])]
    if block_type == "recurrent":
        return loops.RecurrentBlock(w, config)
    options = {**config, "logit_scaling": None}
    if block_type == "global_attention":
        options["sliding_window"] = None
    return loops.LocalAttention(w, options)


def hgrn2_mixer(w, config, i, weights):
    if i in config.get("attention_layers", ()):
        head_dim = config["hidden_dim"] // config["num_query_heads"]
        options = {"head_dim": head_dim, "partial_rotary_factor": 1, "logit_scaling": None}
        return loops.LocalAttention(w, {**config, **options})
    bound = 0
    if "lower_bounds/logits" in weights:
        shares = np.exp(weights["lower_bounds/logits"])
        shares /= shares.sum(axis=0)
        bound = shares[1 : i + 1].sum(axis=0)
    return loops.HGRN2(w, config, bound)


LIGHTNING = {
    "value_activation": "linear",
    "layer_norm_epsilon": 1e-6,
    "layer_index": 0,
    "use_qk_norm": False,
    "rope_max_wavelength": None,
    "query_scale": None,
}


def transnormer_mixer(w, config, i, weights):
    activations = {"query_key_activation": "silu", "gate_activation": "linear"}
    return loops.LightningAttention(w, {**LIGHTNING, **config, **activations, "layer_index": i})


def lightning_hybrid_mixer(w, config, i, weights):
    if config["block_types"][i] == "global_attention":
        options = {"logit_scaling": config["attention_logit_scaling"], "sliding_window": None}
        return loops.LocalAttention(w, {**config, **options, "partial_rotary_factor": 0})
    options = {
        "num_heads": config["num_lightning_heads"] or config["num_query_heads"],
        "head_dim": config["lightning_head_dim"] or config["head_dim"],
        "query_scale": config["lightning_query_scale"],
        "decay_schedule": "alibi",
        "query_key_activation": "linear",
        "gate_activation": "sigmoid",
    }
    return loops.LightningAttention(w, {**LIGHTNING, **config, **options, "use_qk_norm": True})


class Sum:
    """Sum of units on the same inputs, each multiplied by a factor or None for 1."""

    def __init__(self, *terms):
        self.terms = [(unit, factor or 1) for unit, factor in terms]

    def step(self, x):
        return sum(factor * unit.step(x) for unit, factor in self.terms)


def mamba_hybrid_mixer(w, config, i, weights):
    block_type = config["block_types"][i]
    if block_type == "mlp":
        return None
    terms = []
    if block_type != "attention":
        names = {"num_heads": "num_mamba_heads", "num_groups": "num_mamba_groups"}
        names["norm_position"] = "mamba_norm_position"
        names["projection_scales"] = "mamba_projection_scales"
        options = {**config, **{ours: config[theirs] for ours, theirs in names.items()}}
        inner = w if block_type == "mamba" else below(w, "mamba")
        terms.append((loops.Mamba2(inner, options), config["mamba_scale"]))
    if block_type != "mamba":
        options = {**config, "logit_scaling": None, "sliding_window": None}
        options["partial_rotary_factor"] = config["rope_max_wavelength"] is not None
        inner = w if block_type == "attention" else below(w, "attention")
        terms.append((loops.LocalAttention(inner, options), config["attention_scale"]))
    return Sum(*terms)


def mamba_hybrid_mlp(w, config):
    if config["mlp"] == "squared_relu":
        return Sum((loops.SquaredReLUMLP(w, config), config["mlp_scale"]))
    options = {"gate_scale": config["mlp_gate_scale"]}
    return Sum((loops.GatedMLP(w, options, "silu"), config["mlp_scale"]))


def lfm2_mixer(w, config, i, weights):
    if config["block_types"][i] == "gated_short_conv":
        return loops.GatedShortConv(w, config)
    options = {"logit_scaling": None, "sliding_window": None, "partial_rotary_factor": 1}
    return loops.LocalAttention(w, {**config, **options})


MIXERS = {
    "griffin": griffin_mixer,
    "hgrn2": hgrn2_mixer,
    "transnormer": transnormer_mixer,
    "lightning_hybrid": lightning_hybrid_mixer,
    "mamba_hybrid": mamba_hybrid_mixer,
    "lfm2": lfm2_mixer,
}
MLPS = {
    "griffin": functools.partial(loops.GatedMLP, activation="gelu"),
    "hgrn2": functools.partial(loops.GatedMLP, activation="silu"),
    "transnormer": functools.partial(loops.GatedMLP, activation="linear"),
    "lightning_hybrid": functools.partial(loops.GatedMLP, activation="silu"),
    "mamba_hybrid": mamba_hybrid_mlp,
    "lfm2": functools.partial(loops.GatedMLP, activation="silu"),
}
