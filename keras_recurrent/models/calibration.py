"""A network in parts, for quantization that calibrates one block after the other.

Keras runs the tokens through what comes before the blocks, and what that returns through one block
after the other, each called with its inputs alone.
"""

import keras


class EmbeddedTokens(keras.Layer):
    """What a network's first block gets: the embeddings, scaled as the network scales them."""

    def __init__(self, backbone):
        super().__init__(dtype=backbone.dtype_policy, autocast=False)
        self.backbone = backbone
        self.built = True

    def call(self, token_ids):
        return self.backbone.embed(token_ids)


class BlockWithArguments(keras.Layer):
    """A block, called with the further arguments that its network gives it.

    Args:
        block: a layer.
        arguments: the dictionary of them.
    """

    def __init__(self, block, arguments):
        super().__init__(dtype=block.dtype_policy, autocast=False)
        self.block = block
        self.arguments = arguments
        self.built = True

    def call(self, inputs):
        return self.block(inputs, **self.arguments)


def layer_structure(backbone, example):
    """The `quantization_layer_structure` of a `RecurrentBackbone`.

    Args:
        backbone: the network.
        example: integers `[B, T]`, any tokens; arguments of blocks do not depend on them.
    """
    arguments = backbone.block_arguments(backbone.embed(example))
    blocks = zip(backbone.transformer_layers, arguments, strict=True)
    return {
        "pre_block_layers": [EmbeddedTokens(backbone)],
        "sequential_blocks": [
            BlockWithArguments(block, further) if further else block for block, further in blocks
        ],
    }
