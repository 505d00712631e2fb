"""A Hawk of a few thousand weights, whose numbers are the same on every backend."""

import keras
import numpy as np

from keras_recurrent.models import GriffinBackbone, GriffinCausalLM

VOCABULARY = 61
SIZES = {
    "vocabulary_size": VOCABULARY,
    "num_layers": 2,
    "hidden_dim": 16,
    "lru_width": 24,
    "intermediate_dim": 40,
    "num_blocks": 4,
}


def tiny_backbone(seed=0, **kwargs):
    """A backbone with weights from NumPy, large enough that logits differ by more than rounding."""
    backbone = GriffinBackbone(**{**SIZES, **kwargs})
    set_weights(backbone, seed)
    return backbone


def tiny_causal_lm(seed=0, preprocessor=None, **kwargs):
    return GriffinCausalLM(tiny_backbone(seed, **kwargs), preprocessor)


def set_weights(model, seed):
    """Draws each weight from NumPy, by its path."""
    rng = np.random.default_rng(seed)
    for weight in sorted(model.weights, key=lambda w: w.path):
        weight.assign(draw(rng, weight.path, weight.shape))


def draw(rng, path, shape):
    noise = rng.normal(size=shape)
    if path.endswith("embeddings"):
        return noise
    if path.endswith("a_logit"):
        return 2.0 + noise  # memories of a few to a hundred tokens
    if path.endswith(("bias", "scale")):
        return 0.3 * noise
    return noise / np.sqrt(shape[-2])


def weights_of(model):
    return {weight.path: keras.ops.convert_to_numpy(weight) for weight in model.weights}


def forward(model, token_ids, real):
    """Logits by a plain call on whole rows."""
    x = {"token_ids": np.asarray(token_ids, "int32"), "padding_mask": np.asarray(real, "int32")}
    return keras.ops.convert_to_numpy(model.predict_on_batch(x)).astype("float32")
