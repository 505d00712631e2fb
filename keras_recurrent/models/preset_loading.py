"""`from_preset` of all models: names, checkpoints and directories."""

import keras_hub

from keras_recurrent.checkpoints import loading


class PresetLoading:
    """Mixin that replaces KerasHub's `from_preset`."""

    @classmethod
    def from_preset(cls, preset, load_weights=None, **kwargs):
        """Loads a model by name, from a checkpoint, or from a directory of `save_to_preset`.

        `presets` of the class lists the names. Presets without published weights start from fresh
        initialization, with one message. The weights of `griffin_tiny_text` are in this package;
        other weights are fetched from the Hugging Face Hub.

        A checkpoint is a directory of `config.json` and `.safetensors` files as saved by
        transformers, or a repository on the Hub, such as `"hf://google/recurrentgemma-2b"` (with
        the extra `huggingface` of this package). Its `tokenizer.model`, or else `tokenizer.json`,
        makes the preprocessor; without these files, `preprocessor` is None and the model takes
        tokens. Weights are converted to the dtype of the Keras policy or of `dtype=` one tensor at
        a time: memory holds neither a second copy of the model nor one in a larger dtype.

        Backbones and text classifiers load the presets of their language model. A text classifier
        then has fresh weights of the classes. A directory of a saved classifier has these weights,
        which are loaded unless `num_classes` is passed. Images have no checkpoints.

        Args:
            preset: string, a name, a directory, or `hf://owner/repository`.
            load_weights: boolean. None, the default: loads weights if the preset has any, that is
                all but names without published weights. True: raises an error if it has none.
                False: starts from fresh initialization.
            **kwargs: arguments of the backbone (`vocabulary_size=`, `dtype=`), and, for tasks, of
                the preprocessor (`sequence_length=`, `packed=`) and of the task (`preprocessor=`,
                `compile=`, `num_classes=`), which override those of the preset.

        Raises:
            ValueError: the name is unknown or of another class, `load_weights=True` and there are
                no weights, an argument is unknown, `num_classes` of a text classifier is missing,
                the configuration of a checkpoint is not supported, or its tensors are missing,
                unknown, misshapen or damaged. All errors are raised before a model is built.
            FileNotFoundError: a checkpoint has no `.safetensors` files (pickled weights are not
                read), or a directory of `save_to_preset` has no `.weights.h5`.

        Example:

        >>> from keras_recurrent.models import GriffinCausalLM, HGRN2TextClassifier
        >>> model = GriffinCausalLM.from_preset(
        ...     "hawk_tiny", num_layers=2, dtype="mixed_bfloat16", sequence_length=64, packed=True
        ... )
        >>> model.backbone.num_layers, model.preprocessor.sequence_length
        (2, 64)
        >>> model = HGRN2TextClassifier.from_preset("hgrn2_tiny", num_classes=3, bidirectional=True)
        >>> model.output_shape
        (None, 3)
        """
        is_task = issubclass(cls, keras_hub.models.Task)
        resolve = loading.resolve_task if is_task else loading.resolve_backbone
        loader, load_weights, kwargs = resolve(cls, preset, load_weights, kwargs)
        return super().from_preset(loader, load_weights, **kwargs)  # type: ignore[misc]
