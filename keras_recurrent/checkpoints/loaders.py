"""Loaders of named presets and of checkpoints in the layout of the Hugging Face Hub.

A loader is made for one call of `from_preset` and caches the files that it read.
"""

import contextlib
import functools
import glob
import logging
import os

import h5py
import keras_hub

from keras_recurrent import compat, presets
from keras_recurrent.checkpoints import checkpoint, files, tensor_table
from keras_recurrent.checkpoints.config_reader import ConfigReader
from keras_recurrent.checkpoints.overrides import (
    check_overrides,
    check_weights_fit,
    split_overrides,
    takes_argument,
)
from keras_recurrent.checkpoints.tokenizer_files import TokenizerFiles
from keras_recurrent.checkpoints.zero_initialization import zero_initialization
from keras_recurrent.tokenizers import BPETokenizer

logger = logging.getLogger("keras_recurrent")
_announced = set()


class RecurrentPresetLoader(compat.PresetLoader):
    """Base class: builds a model from a backbone and a preprocessor, and ignores no override."""

    def __init__(self, preset, config, backbone_cls):
        super().__init__(preset, config)
        self.backbone_cls = backbone_cls

    def check_backbone_class(self):
        return self.backbone_cls

    def has_weights(self):
        """Returns True if the preset has weights, even if their files are missing."""
        return True

    def make_preprocessor(self, cls, load_weights, **kwargs):
        """Returns the preprocessor of a model with or without its weights, or None."""
        raise NotImplementedError

    def load_task(self, cls, load_weights, load_task_weights, **kwargs):
        task, backbone, preprocessor = split_overrides(self.preset, cls, kwargs)
        # The preprocessor is quick to read, so its errors are raised before weights are read.
        if "preprocessor" not in task and cls.preprocessor_cls is not None:
            task["preprocessor"] = self.make_preprocessor(
                cls.preprocessor_cls, load_weights, **preprocessor
            )
        if "backbone" not in task:
            task["backbone"] = self.load_backbone(cls.backbone_cls, load_weights, **backbone)
        return cls(**task)


class NamedPresetLoader(RecurrentPresetLoader):
    """Loader of a preset in a table: its sizes, and weights of this package or on the Hub.

    Args:
        name: string, the preset.
        backbone_cls: the class of its backbone.
        row: its `keras_recurrent.presets.Preset`.
        get_loader: the function that returns the loader of published weights.
    """

    def __init__(self, name, backbone_cls, row, get_loader):
        super().__init__(name, {}, backbone_cls)
        self.row = row
        self._get_loader = get_loader

    @functools.cached_property
    def published(self):
        """Loader of the published weights."""
        loader = self._get_loader(self.row.weights)
        loader.default_chat_template = self.row.chat_template
        loader.config = {**self.row.config_defaults, **loader.config}
        return loader

    def has_weights(self):
        return self.row.weights is not None

    def has_hub_weights(self):
        return self.has_weights() and self.row.weights.startswith(files.HUB)

    def load_backbone(self, cls, load_weights, **kwargs):
        check_overrides(self.preset, [cls], kwargs)
        if load_weights and self.has_weights():
            check_weights_fit(self.preset, cls, kwargs)
            if self.has_hub_weights():
                return self.published.load_backbone(cls, True, **kwargs)
            backbone = cls(**{**self.row.backbone_arguments, **kwargs})
            backbone.load_weights(presets.path_of_weights(self.row.weights))
            return backbone
        if not self.has_weights() and self.preset not in _announced:
            _announced.add(self.preset)
            logger.warning(
                "%s has no published weights: it starts from fresh initialization.", self.preset
            )
        return cls(**{**self.row.backbone_arguments, **kwargs})

    def load_tokenizer(self, cls, config_file=None, **kwargs):
        if self.has_hub_weights():
            return self.published.load_tokenizer(cls, **kwargs)
        check_overrides(self.preset, [cls], kwargs)
        return cls(**kwargs)

    def load_preprocessor(self, cls, config_file=None, **kwargs):
        check_overrides(self.preset, [cls], kwargs)
        arguments = {**self.row.preprocessor_arguments, **kwargs}
        if self.has_hub_weights() and "tokenizer" not in kwargs:
            return self.published.load_preprocessor(cls, **arguments)
        if self.row.chat_template is not None and takes_argument(cls, "chat_template"):
            arguments.setdefault("chat_template", self.row.chat_template)
        return super().load_preprocessor(cls, **arguments)

    def make_preprocessor(self, cls, load_weights, **kwargs):
        if not self.has_hub_weights() or "tokenizer" in kwargs:
            return self.load_preprocessor(cls, **kwargs)
        if not load_weights:
            # Fresh weights belong to no tokenizer; the default one needs no network.
            return self.load_preprocessor(cls, tokenizer=cls.tokenizer_cls(), **kwargs)
        if not kwargs and not self.published.has_tokenizer():
            return None
        arguments = {**self.row.preprocessor_arguments, **kwargs}
        return self.published.make_preprocessor(cls, True, **arguments)


class CheckpointLoader(RecurrentPresetLoader):
    """Loader of `config.json`, `.safetensors` files and, if present, a tokenizer.

    The configuration and the headers of the tensors are checked before the model is built. Tensors
    are then read one by one.

    Args:
        preset_files: the `PresetFiles` of a directory or of `hf://owner/repository`.
        config: the dictionary of its `config.json`.
        backbone_cls: the class of its backbone.
        layout: the family's `Layout`.

    Attributes:
        default_chat_template: string or None, the chat template if the files have none.
    """

    default_chat_template = None

    def __init__(self, preset_files, config, backbone_cls, layout):
        super().__init__(preset_files.preset, config, backbone_cls)
        self.files = preset_files
        self.layout = layout
        self.tokenizer_files = TokenizerFiles(preset_files, config)

    def has_tokenizer(self):
        return self.tokenizer_files.exist()

    def load_backbone(self, cls, load_weights, **kwargs):
        check_overrides(self.preset, [cls], kwargs)
        if not load_weights:
            return cls(**{**self.layout.backbone_arguments(self.config, self._where()), **kwargs})
        check_weights_fit(self.preset, cls, kwargs)
        arguments, found, tensors = self.read_headers()
        with zero_initialization():
            backbone = cls(**{**arguments, **kwargs})
        tensor_table.assign(backbone, found, tensors)
        return backbone

    def read_headers(self):
        """Returns the backbone's arguments, the `Checkpoint` and its `Tensor`s, all checked."""
        config = ConfigReader(self.config, self._where())
        arguments = self.layout.read_arguments(config)
        found = checkpoint.Checkpoint(self.preset, self.layout.canonical_name)
        # Each block has at least one tensor. This bounds the size of the table of tensors.
        if arguments["num_layers"] > len(found.tensors):
            raise ValueError(
                f"{self._where()} describes {arguments['num_layers']} blocks, more than the "
                f"{len(found.tensors)} tensors of the weights.{config.defaults_note()} The files "
                "are of different models."
            )
        tensors = self.layout.tensors(arguments)
        tensor_table.check(found, tensors, config.defaults_note())
        return arguments, found, tensors

    def _where(self):
        return f"{files.CONFIG_FILE} of {self.preset!r}"

    def load_tokenizer(self, cls, config_file=None, **kwargs):
        return self.tokenizer_files.load(**kwargs)

    def load_preprocessor(self, cls, config_file=None, **kwargs):
        check_overrides(self.preset, [cls], kwargs)
        if issubclass(cls, keras_hub.models.CausalLMPreprocessor) and "tokenizer" not in kwargs:
            tokenizer = kwargs["tokenizer"] = self.load_tokenizer(cls.tokenizer_cls)
            # Models with BPE often have no start token, or one that does not begin texts.
            if isinstance(tokenizer, BPETokenizer):
                kwargs.setdefault("add_start_token", tokenizer.adds_start_token)
            if takes_argument(cls, "chat_template"):
                kwargs = {**self._chat_arguments(tokenizer, kwargs), **kwargs}
        return super().load_preprocessor(cls, **kwargs)

    def _chat_arguments(self, tokenizer, given):
        """Returns the arguments of a preprocessor that the files have, except those given."""
        arguments = {}
        if "chat_template" not in given:
            template = self.tokenizer_files.read_chat_template() or self.default_chat_template
            arguments["chat_template"] = template
        if "extra_stop_token_ids" not in given:
            ids = self.tokenizer_files.read_stop_token_ids()
            others = tuple(id for id in ids if id != tokenizer.end_token_id)
            arguments["extra_stop_token_ids"] = others
        return arguments

    def make_preprocessor(self, cls, load_weights, **kwargs):
        if "tokenizer" in kwargs or self.has_tokenizer():
            return self.load_preprocessor(cls, **kwargs)
        if kwargs:
            raise ValueError(
                f"{', '.join(map(repr, sorted(kwargs)))}: {self.preset!r} has neither "
                f"{files.TOKENIZER_FILE} nor {files.BPE_FILE} and so no preprocessor that takes "
                "it. Pass `tokenizer=` as well."
            )
        return None


class SavedPresetLoader(compat.KerasPresetLoader):
    """KerasHub's loader of directories of `save_to_preset`; checks weight files before loading.

    Args:
        preset: string, a directory or a repository.
        config: the dictionary of its `config.json`.
    """

    def load_backbone(self, cls, load_weights, **kwargs):
        if not load_weights:
            return super().load_backbone(cls, load_weights, **kwargs)
        self._check_weights()
        with zero_initialization():
            return super().load_backbone(cls, load_weights, **kwargs)

    def load_task(self, cls, load_weights, load_task_weights, **kwargs):
        if load_weights:
            self._check_weights()
        with contextlib.ExitStack() as stack:
            # All weights of a language model are read; the classes of a classifier may be fresh.
            if load_weights and issubclass(cls, keras_hub.models.CausalLM):
                stack.enter_context(zero_initialization())
            return super().load_task(cls, load_weights, load_task_weights, **kwargs)

    def _check_weights(self):
        """Raises an error if a file of weights in the directory is damaged."""
        for path in sorted(glob.glob(os.path.join(glob.escape(self.preset), "*.weights.h5"))):
            try:
                with h5py.File(path) as file:
                    file.visititems(lambda name, item: None)
            except (OSError, RuntimeError, KeyError, ValueError) as error:
                raise ValueError(
                    f"{path} is damaged or cut off ({error}). Fetch or save it again."
                ) from error
