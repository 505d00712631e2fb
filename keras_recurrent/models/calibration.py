"""Decomposition of a network for quantization that calibrates one block after another.

Keras runs the tokens through the layers before the blocks, and the result through one block after
another, each called with its inputs only.
"""

import keras


class EmbeddedTokens(keras.Layer):
    """Input of the first block: the scaled embeddings."""

    def __init__(self, backbone):
        super().__init__(dtype=backbone.dtype_policy, autocast=False)
        self.backbone = backbone
        self.built = True

    def call(self, token_ids):
        return self.backbone.embed(token_ids)


class BlockWithArguments(keras.Layer):
    """A block with the further call arguments, a dictionary, that its network passes to it."""

    def __init__(self, block, arguments):
        super().__init__(dtype=block.dtype_policy, autocast=False)
        self.block = block
        self.arguments = arguments
        self.built = True

    def call(self, inputs):
        return self.block(inputs, **self.arguments)


def layer_structure(backbone, example):
    """Returns the `quantization_layer_structure` of a `RecurrentBackbone`.

    example: integers `[B, T]`, any tokens; the arguments of blocks do not depend on them.
    """
    arguments = backbone.block_arguments(backbone.embed(example))
    blocks = zip(backbone.transformer_layers, arguments, strict=True)
    return {
        "pre_block_layers": [EmbeddedTokens(backbone)],
        "sequential_blocks": [
            BlockWithArguments(block, further) if further else block for block, further in blocks
        ],
    }
