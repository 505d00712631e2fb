"""What `from_preset` reads from: names in a table, and checkpoints of the Hugging Face Hub."""

import logging

import keras

from keras_recurrent import compat
from keras_recurrent.conversion import checkpoint, files, tensor_table
from keras_recurrent.models.overrides import check_overrides, check_weights_fit, split_overrides
from keras_recurrent.tokenizers import SentencePieceTokenizer

TOKENIZER_FILE = "tokenizer.model"

logger = logging.getLogger("keras_recurrent")
_announced = set()


class RecurrentPresetLoader(compat.PresetLoader):
    """Base class: a model is a backbone and a preprocessor, and no override is ignored."""

    def __init__(self, preset, config, backbone_cls):
        super().__init__(preset, config)
        self.backbone_cls = backbone_cls

    def check_backbone_class(self):
        return self.backbone_cls

    def has_weights(self):
        """Whether weights belong to it, even if they are not to be found."""
        return True

    def make_preprocessor(self, cls, load_weights, **kwargs):
        """The preprocessor of a model with or without its weights, or None."""
        raise NotImplementedError

    def load_task(self, cls, load_weights, load_task_weights, **kwargs):
        task, backbone, preprocessor = split_overrides(self.preset, cls, kwargs)
        if "backbone" not in task:
            task["backbone"] = self.load_backbone(cls.backbone_cls, load_weights, **backbone)
        if "preprocessor" not in task and cls.preprocessor_cls is not None:
            task["preprocessor"] = self.make_preprocessor(
                cls.preprocessor_cls, load_weights, **preprocessor
            )
        return cls(**task)


class NamedPresetLoader(RecurrentPresetLoader):
    """Builds the models of a name from sizes, or from weights published elsewhere.

    Args:
        name: string, the preset.
        backbone_cls: the class of its backbone.
        backbone_config: a dictionary of the backbone's arguments.
        preprocessor_config: a dictionary of the preprocessor's arguments, but for the tokenizer.
        weights: string, the preset with the weights; None: there are none.
    """

    def __init__(self, name, backbone_cls, backbone_config, preprocessor_config, weights=None):
        super().__init__(name, {}, backbone_cls)
        self.backbone_config = backbone_config
        self.preprocessor_config = preprocessor_config
        self.weights = weights

    def has_weights(self):
        return self.weights is not None

    def load_backbone(self, cls, load_weights, **kwargs):
        check_overrides(self.preset, [cls], kwargs)
        if load_weights and self.weights:
            check_weights_fit(self.preset, kwargs)
            return compat.get_preset_loader(self.weights).load_backbone(cls, True, **kwargs)
        if not self.weights and self.preset not in _announced:
            _announced.add(self.preset)
            logger.warning(
                "%s has no published weights: it starts from fresh initialization.", self.preset
            )
        return cls(**{**self.backbone_config, **kwargs})

    def load_tokenizer(self, cls, config_file=None, **kwargs):
        if self.weights:
            return compat.get_preset_loader(self.weights).load_tokenizer(cls, **kwargs)
        check_overrides(self.preset, [cls], kwargs)
        return cls(**kwargs)

    def load_preprocessor(self, cls, config_file=None, **kwargs):
        check_overrides(self.preset, [cls], kwargs)
        return super().load_preprocessor(cls, **{**self.preprocessor_config, **kwargs})

    def make_preprocessor(self, cls, load_weights, **kwargs):
        if self.weights and not load_weights and "tokenizer" not in kwargs:
            # Fresh weights know no tokens yet; these need no network.
            kwargs["tokenizer"] = cls.tokenizer_cls()
        elif self.weights and "tokenizer" not in kwargs:
            published = compat.get_preset_loader(self.weights)
            if not kwargs and not files.exists(self.weights, TOKENIZER_FILE):
                return None
            return published.make_preprocessor(cls, True, **{**self.preprocessor_config, **kwargs})
        return self.load_preprocessor(cls, **kwargs)


class CheckpointLoader(RecurrentPresetLoader):
    """Reads a checkpoint: `config.json`, `.safetensors` files and, where it is, `tokenizer.model`.

    Configuration and tensors are compared with the model before one is built, and then read one
    by one.

    Args:
        preset: string, a directory or `hf://owner/repository`.
        config: the dictionary of its `config.json`.
        backbone_cls: the class of its backbone.
        layout: the family's `Layout`.
    """

    def __init__(self, preset, config, backbone_cls, layout):
        super().__init__(preset, config, backbone_cls)
        self.layout = layout

    def load_backbone(self, cls, load_weights, **kwargs):
        check_overrides(self.preset, [cls], kwargs)
        where = f"{files.CONFIG_FILE} of {self.preset!r}"
        arguments = self.layout.backbone_arguments(self.config, where)
        if not load_weights:
            return cls(**{**arguments, **kwargs})
        check_weights_fit(self.preset, kwargs)
        _check_dtype(kwargs.get("dtype"))
        found = checkpoint.Checkpoint(self.preset)
        tensors = self.layout.tensors(arguments)
        tensor_table.check(found, tensors)
        backbone = cls(**arguments, **kwargs)
        tensor_table.assign(backbone, found, tensors)
        return backbone

    def load_tokenizer(self, cls, config_file=None, **kwargs):
        ids = {
            "start_token_id": self.config.get("bos_token_id"),
            "end_token_id": self.config.get("eos_token_id"),
            "pad_token_id": self.config.get("pad_token_id"),
        }
        # Where several tokens end a text, the first is the one that ends a document in training.
        ids = {name: id[0] if isinstance(id, list) else id for name, id in ids.items()}
        with open(files.fetch(self.preset, TOKENIZER_FILE), "rb") as file:
            return SentencePieceTokenizer(file.read(), **{**ids, **kwargs})

    def load_preprocessor(self, cls, config_file=None, **kwargs):
        check_overrides(self.preset, [cls], kwargs)
        return super().load_preprocessor(cls, **kwargs)

    def make_preprocessor(self, cls, load_weights, **kwargs):
        if "tokenizer" in kwargs or files.exists(self.preset, TOKENIZER_FILE):
            return self.load_preprocessor(cls, **kwargs)
        if kwargs:
            raise ValueError(
                f"{', '.join(map(repr, sorted(kwargs)))}: {self.preset!r} has no {TOKENIZER_FILE}, "
                "so there is no preprocessor to take it. Pass a `tokenizer=` as well."
            )
        return None


def _check_dtype(dtype):
    policy = keras.dtype_policies.get(dtype)
    if policy.quantization_mode is not None:
        raise ValueError(
            f"`dtype`: a checkpoint holds floating-point weights; got {policy.name!r}. Load it "
            "without, then call `model.quantize(...)`."
        )
