"""HGRN2 as a classifier of images."""

import keras
import keras_hub

from keras_recurrent.checkpoints import loading
from keras_recurrent.models.hgrn2.hgrn2_vision_backbone import HGRN2VisionBackbone
from keras_recurrent.training.saved_training import SavedTraining
from keras_recurrent.training.torch_training import CheckedTorchTraining


@keras.saving.register_keras_serializable(package="keras_recurrent")
class HGRN2ImageClassifier(CheckedTorchTraining, SavedTraining, keras_hub.models.ImageClassifier):
    """HGRN2 as a classifier of images.

    An `HGRN2VisionBackbone`, the mean of its patches, and a linear map to one logit a class. Qin et
    al. 2024, arXiv:2404.07904. It is a KerasHub image classifier: `fit`, `evaluate` and `predict`
    on images, `save_to_preset`. Nothing is resized or scaled: images come in the backbone's
    `image_shape`, as floats around 0.

    Args:
        backbone: an `HGRN2VisionBackbone`.
        num_classes: integer. Defaults to 1000, as in ImageNet.
        preprocessor: a layer or function that is applied to what `fit`, `evaluate` and `predict`
            get; None: images come as they are.
        pooling: `"avg"` or `"max"`, over patches.
        activation: of the outputs; None: they are logits.
        dropout: float, the part of the pooled channels that is dropped in training.
        compile: whether to compile with KerasHub's defaults (Adam at 5e-5, cross-entropy,
            accuracy).
        name: string.
        trainable: boolean.

    Call arguments:
        inputs: images `[B, height, width, channels]`.

    Returns:
        `[B, num_classes]`, logits if `activation` is None.

    Example: bright images from dark ones.

    >>> import numpy as np
    >>> import keras, keras_recurrent
    >>> classifier = keras_recurrent.models.HGRN2ImageClassifier.from_preset(
    ...     "hgrn2_vision_tiny", image_shape=(32, 32, 1), num_layers=1, num_classes=2
    ... )
    >>> classifier.compile(keras.optimizers.Adam(1e-3), classifier.loss, metrics=["accuracy"])
    >>> labels = np.arange(8) % 2
    >>> images = np.random.normal(size=(8, 32, 32, 1)) + 2 * labels[:, None, None, None]
    >>> history = classifier.fit(images, labels, epochs=5, verbose=0)
    >>> history.history["loss"][-1] < history.history["loss"][0]
    True
    """

    backbone_cls = HGRN2VisionBackbone

    def __init__(
        self,
        backbone,
        num_classes=1000,
        preprocessor=None,
        pooling="avg",
        activation=None,
        dropout=0.0,
        compile=True,
        name=None,
        trainable=True,
    ):
        super().__init__(
            backbone,
            num_classes,
            preprocessor=preprocessor,
            pooling=pooling,
            activation=activation,
            dropout=dropout,
            compile=compile,
            name=name,
            trainable=trainable,
        )

    # Without a preprocessor, KerasHub would only hand images on, as a dataset that Keras cannot
    # shuffle, with a warning of Keras and one of grain.

    def fit(self, *args, **kwargs):
        """As in Keras; see `keras.Model.fit`."""
        return self._trains_by().fit(self, *args, **kwargs)

    def evaluate(self, *args, **kwargs):
        """As in Keras; see `keras.Model.evaluate`."""
        return self._trains_by().evaluate(self, *args, **kwargs)

    def predict(self, *args, **kwargs):
        """As in Keras; see `keras.Model.predict`."""
        return self._trains_by().predict(self, *args, **kwargs)

    def _trains_by(self):
        return keras.Model if self.preprocessor is None else keras_hub.models.ImageClassifier

    @classmethod
    def from_preset(cls, preset, load_weights=None, **kwargs):
        """A classifier by the name of its sizes, or from a directory of `save_to_preset`.

        Args:
            preset: string, one of `presets` of the class, or a directory.
            load_weights: None, the default, loads weights where they belong to the preset: all but
                names without published ones. True insists on them, False leaves them alone.
            **kwargs: whatever the backbone (`image_shape=`, `dtype=`) and the classifier
                (`num_classes=`, `dropout=`) take, in place of what the preset says.

        Raises:
            ValueError: an unknown name, one of another class, `load_weights=True` where there are
                none, or an argument that nothing understands.
            FileNotFoundError: a directory of `save_to_preset` without its `.weights.h5` files.
        """
        loader, load_weights, kwargs = loading.resolve_task(cls, preset, load_weights, kwargs)
        return super().from_preset(loader, load_weights, **kwargs)
