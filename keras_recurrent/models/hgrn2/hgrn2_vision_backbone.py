"""Network of HGRN2 for images, from pixels to a hidden state for each patch."""

import keras
import keras_hub

from keras_recurrent.checks.arguments import check_positive_integers
from keras_recurrent.layers import BidirectionalHGRN2, LowerBounds, RMSNorm, SwiGLU
from keras_recurrent.models.network import Network
from keras_recurrent.training.torch_training import TorchTraining


@keras.saving.register_keras_serializable(package="keras_recurrent")
class HGRN2VisionBackbone(TorchTraining, Network):
    """Network of HGRN2 for images: patches are tokens, mixed in both directions.

    ```
    x = W patch + position                      one token for each patch, row by row
    x = x + BidirectionalHGRN2(RMSNorm(x))      with lower bounds that increase from block to block
    x = x + SwiGLU(RMSNorm(x))
    ```

    Qin et al. 2024 (arXiv:2404.07904, section 4), whose image models have the scale of DeiT
    (Touvron et al. 2020, arXiv:2012.12877), with its patches and learned positions.

    Args:
        image_shape: `(height, width, channels)` in pixels, both sides multiples of `patch_size`.
        patch_size: integer, pixels.
        num_layers: integer, the number of blocks.
        hidden_dim: integer, the width D.
        intermediate_dim: integer, the width inside the SwiGLU, 3 D in the paper's sizes.
        expand_ratio: integer, the size of a head, which must divide D. Defaults to 64.
        layer_norm_epsilon: float, ε of the norms.
        dtype: a dtype, policy or its name.
        name: string.
        trainable: boolean.

    Call arguments:
        inputs: images `[B, height, width, channels]`, as floats around 0, channels last.

    Returns:
        `[B, height / patch_size, width / patch_size, hidden_dim]`, in the compute dtype.

    Raises:
        ValueError: a size is below 1, `patch_size` does not divide `image_shape`, or `expand_ratio`
            does not divide `hidden_dim`.

    Example:

    >>> import numpy as np
    >>> import keras_recurrent
    >>> backbone = keras_recurrent.models.HGRN2VisionBackbone(
    ...     image_shape=(8, 12, 1),
    ...     patch_size=4,
    ...     num_layers=2,
    ...     hidden_dim=16,
    ...     intermediate_dim=48,
    ...     expand_ratio=8,
    ... )
    >>> tuple(backbone(np.zeros((5, 8, 12, 1))).shape)
    (5, 2, 3, 16)
    """

    def __init__(
        self,
        image_shape,
        patch_size,
        num_layers,
        hidden_dim,
        intermediate_dim,
        *,
        expand_ratio=64,
        layer_norm_epsilon=1e-6,
        dtype=None,
        name=None,
        trainable=True,
    ):
        check_positive_integers(
            patch_size=patch_size,
            num_layers=num_layers,
            hidden_dim=hidden_dim,
            intermediate_dim=intermediate_dim,
            expand_ratio=expand_ratio,
        )
        image_shape = _check_image_shape(image_shape, patch_size)
        rows, columns = image_shape[0] // patch_size, image_shape[1] // patch_size

        def norm(name):
            return RMSNorm(epsilon=layer_norm_epsilon, zero_centered=False, dtype=dtype, name=name)

        inputs = keras.Input(image_shape, name="images")
        x = keras.layers.Conv2D(
            hidden_dim,
            patch_size,
            strides=patch_size,
            data_format="channels_last",
            dtype=dtype,
            name="patch_embedding",
        )(inputs)
        x = keras.layers.Reshape((rows * columns, hidden_dim), dtype=dtype, name="tokens")(x)
        positions = keras_hub.layers.PositionEmbedding(
            rows * columns, dtype=dtype, name="position_embedding"
        )
        x = keras.ops.add(x, positions(x))
        bounds = [None]  # the bound of the first block is 0
        if num_layers > 1:
            table = LowerBounds(num_layers, dtype=dtype, name="lower_bounds")(x)
            bounds += [table[i] for i in range(num_layers - 1)]
        for i in range(num_layers):
            y = norm(f"block_{i}_temporal_norm")(x)
            y = BidirectionalHGRN2(
                expand_ratio=expand_ratio, dtype=dtype, name=f"block_{i}_temporal_block"
            )(y, lower_bound=bounds[i])
            x = keras.ops.add(x, y)
            y = norm(f"block_{i}_channel_norm")(x)
            y = SwiGLU(intermediate_dim, dtype=dtype, name=f"block_{i}_mlp")(y)
            x = keras.ops.add(x, y)
        x = norm("final_norm")(x)
        x = keras.layers.Reshape((rows, columns, hidden_dim), dtype=dtype, name="patches")(x)
        super().__init__(inputs=inputs, outputs=x, dtype=dtype, name=name, trainable=trainable)

        self.store_arguments(HGRN2VisionBackbone, locals())
        self.data_format = "channels_last"  # of the outputs, for KerasHub's tasks


def _check_image_shape(image_shape, patch_size):
    """Returns the shape of images as a tuple."""
    if not isinstance(image_shape, (tuple, list)) or len(image_shape) != 3:
        raise ValueError(
            f"`image_shape` must be (height, width, channels) in pixels; got {image_shape}."
        )
    check_positive_integers(**{f"image_shape[{i}]": size for i, size in enumerate(image_shape)})
    height, width, _ = image_shape
    if height % patch_size or width % patch_size:
        raise ValueError(
            f"`image_shape` must be a multiple of `patch_size`, {patch_size} pixels; got "
            f"{tuple(image_shape)}. Resize or crop the images first."
        )
    return tuple(image_shape)
