"""Checkpoint layout of TransNormerLLM.

Qin et al. 2023, arXiv:2307.14995. One tensor has the projections to queries, keys, values and
gates, concatenated along axis 0. θ of the first layer has an axis of tokens between heads and
channels.
"""

from keras_recurrent.checkpoints.config_reader import REQUIRED
from keras_recurrent.checkpoints.layout import Layout
from keras_recurrent.checkpoints.tensor_table import Transform, stacked

# [heads, 1, channels] in the files.
LRPE_THETA = Transform(lambda tensor: (tensor[:, 0],), lambda weight: weight[:, None])


class TransNormer(Layout):
    """`TransNormerBackbone` from and to the published `TransnormerForCausalLM`."""

    model_type = "transnormer"
    architecture = "TransnormerForCausalLM"
    final_norm = None  # it has no weight
    unused = ("add_bos_token",)  # training only

    keys = {
        "vocabulary_size": ("vocab_size", REQUIRED),
        "num_layers": ("decoder_layers", REQUIRED),
        "hidden_dim": ("decoder_embed_dim", REQUIRED),
        "num_heads": ("decoder_attention_heads", REQUIRED),
    }
    constants = {
        "decay_schedule": "checkpoints",
        "tie_word_embeddings": False,
        "layer_norm_epsilon": 1e-6,
    }
    fixed = {
        "linear_act_fun": ("silu", "swish"),
        "norm_type": ("simplermsnorm",),
        **dict.fromkeys(("no_scale_embedding", "bias", "tie_word_embeddings"), (False,)),
    }

    def read_further_arguments(self, config, arguments):
        hidden_dim, num_heads = arguments["hidden_dim"], arguments["num_heads"]
        inner = config.integer("hidden_dim", default=hidden_dim, multiple_of=num_heads)
        config.fixed("linear_use_lrpe_list", _lrpe_layers(arguments["num_layers"]))
        if config.config.get("glu_dim") == -1:
            config.fixed("glu_dim", -1)
            intermediate_dim = hidden_dim
        else:
            intermediate_dim = config.integer("glu_dim")
        return {"intermediate_dim": intermediate_dim, "head_dim": inner // num_heads}

    def write_config(self, arguments):
        return {
            **super().write_config(arguments),
            "hidden_dim": arguments["num_heads"] * arguments["head_dim"],
            "glu_dim": arguments["intermediate_dim"],
            "linear_use_lrpe_list": _lrpe_layers(arguments["num_layers"]),
        }

    def block_tensors(self, i, block, arguments):
        d, m = arguments["hidden_dim"], arguments["intermediate_dim"]
        heads, head_dim = arguments["num_heads"], arguments["head_dim"]
        inner = heads * head_dim
        name, qkvu = "token_mixer.qkvu_proj.weight", (f"{letter}_proj/kernel" for letter in "qkvu")
        weights = [f"temporal_block/{weight}" for weight in qkvu]
        yield block.tensor(name, (4 * inner, d), *weights, transform=stacked(4))
        yield from block.linear("token_mixer.out_proj", inner, d, "temporal_block/o_proj")
        if i == 0:
            name, theta = "token_mixer.lrpe.theta", "temporal_block/lrpe/theta"
            yield block.tensor(name, (heads, 1, head_dim), theta, transform=LRPE_THETA)
        yield from block.mlp("channel_mixer", d, m, names=("l1", "l2", "l3"))


def _lrpe_layers(num_layers):
    """Returns 1 for the first layer, the only one with positions, and 0 for the others."""
    return [1] + [0] * (num_layers - 1)
