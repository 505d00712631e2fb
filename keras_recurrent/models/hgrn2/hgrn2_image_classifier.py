"""Image classifier with HGRN2."""

import keras
import keras_hub

from keras_recurrent.models.hgrn2.hgrn2_vision_backbone import HGRN2VisionBackbone
from keras_recurrent.models.preset_loading import PresetLoading
from keras_recurrent.training.saved_training import SavedTraining
from keras_recurrent.training.torch_training import TorchTraining


@keras.saving.register_keras_serializable(package="keras_recurrent")
class HGRN2ImageClassifier(
    TorchTraining, SavedTraining, PresetLoading, keras_hub.models.ImageClassifier
):
    """Image classifier with HGRN2.

    An `HGRN2VisionBackbone`, the mean over patches, and a linear layer with one logit per class.
    Qin et al. 2024, arXiv:2404.07904. The class supports KerasHub's image classifier API: `fit`,
    `evaluate` and `predict` on images, and `save_to_preset`. Images are neither resized nor scaled:
    they must have the backbone's `image_shape`, as floats around 0.

    Args:
        backbone: an `HGRN2VisionBackbone`.
        num_classes: integer. Defaults to 1000, as in ImageNet.
        preprocessor: a layer or function that is applied to the inputs of `fit`, `evaluate` and
            `predict`. None: no preprocessing.
        pooling: `"avg"` or `"max"`, over patches.
        activation: activation of the outputs. None: they are logits.
        dropout: float, dropout rate of the pooled channels.
        compile: boolean, compiles with KerasHub's defaults (Adam at 5e-5, cross-entropy, accuracy).
        name: string.
        trainable: boolean.

    Call arguments:
        inputs: images `[B, height, width, channels]`.

    Returns:
        `[B, num_classes]`, logits if `activation` is None.

    Example: bright and dark images.

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

    # Without a preprocessor, KerasHub would pass images to Keras as a dataset that Keras cannot
    # shuffle, with warnings of Keras and grain.

    def fit(self, *args, **kwargs):
        """Trains the classifier; see `keras.Model.fit`."""
        return self._trainer().fit(self, *args, **kwargs)

    def evaluate(self, *args, **kwargs):
        """Evaluates the classifier; see `keras.Model.evaluate`."""
        return self._trainer().evaluate(self, *args, **kwargs)

    def predict(self, *args, **kwargs):
        """Returns predictions; see `keras.Model.predict`."""
        return self._trainer().predict(self, *args, **kwargs)

    def _trainer(self):
        return keras.Model if self.preprocessor is None else keras_hub.models.ImageClassifier
