"""Base class for the checkpoint layout of a family, and the registry of all layouts."""

import math
from typing import Any

from keras_recurrent.checkpoints.config_reader import COMMON_UNUSED_KEYS, ConfigReader
from keras_recurrent.checkpoints.files import CONFIG_FILE
from keras_recurrent.checkpoints.tensor_table import TRANSPOSED, BlockTensors, Tensor


class Layout:
    """Layout of one family's checkpoints on the Hugging Face Hub.

    A family defines the attributes and `block_tensors`, and extends `read_further_arguments`,
    `requirements` and `write_config` for keys that the attributes cannot express, and `tensors` if
    its tensors outside blocks have other names. All families share reading, writing and their
    checks.

    Attributes:
        model_type: string, `model_type` of `config.json`.
        architecture: string, the class that transformers loads.
        tokenizer_class: string, the SentencePiece tokenizer class that transformers loads.
        embedding, final_norm: strings, the names of these tensors. None: no norm has a weight.
        blocks: string, the prefix of the names of tensors in blocks.
        unused: keys of `config.json`, in addition to `COMMON_UNUSED_KEYS`, that do not change the
            outputs of the model.
        keys: `{argument: (key, default)}` of arguments that a file stores unchanged. The default
            has the type of the value: an integer, a float above 0 or a boolean. For integers, it
            may also be `REQUIRED` (the key must be present), None (the key may be missing) or the
            name of an earlier argument, whose value is then the default.
        constants: `{argument: value}`, equal in all checkpoints of the layout.
        fixed: `{key: supported values}`; the first is the default, and is written.
    """

    model_type: str
    architecture: str
    tokenizer_class = "LlamaTokenizer"
    embedding = "model.embed_tokens.weight"
    final_norm: str | None = "model.norm.weight"
    blocks = "model.layers"
    unused: tuple[str, ...] = ()
    keys: dict[str, tuple[str, Any]] = {}
    constants: dict[str, Any] = {}
    fixed: dict[str, tuple] = {}

    def read_config(self, config):
        """Returns the backbone's arguments, from a `ConfigReader`."""
        for key, values in self.fixed.items():
            config.fixed(key, *values)
        arguments = {**config.values(self.keys), **self.constants}
        return {**arguments, **self.read_further_arguments(config, arguments)}

    def read_further_arguments(self, config, arguments):
        """Returns further arguments, given those of `keys` and `constants`."""
        return {}

    def requirements(self, arguments):
        """Returns the backbone arguments that the layout restricts, with their requirements.

        Returns:
            `{argument: (fits, requirement)}`: True if the value in `arguments` can be stored, and a
            description of the values that can be stored.
        """
        numbers = [
            argument
            for argument, (_, default) in self.keys.items()
            if default is not None and not isinstance(default, bool)
        ]
        return {
            **{name: ((arguments[name] or 0) > 0, "a number above 0") for name in numbers},
            **{
                name: (arguments[name] == value, repr(value))
                for name, value in self.constants.items()
            },
        }

    def write_config(self, arguments):
        """Returns the dictionary of `config.json`, from arguments that meet `requirements`."""
        values = {key: arguments[argument] for argument, (key, _) in self.keys.items()}
        return {
            **{key: value for key, value in values.items() if value is not None},
            **{key: values[0] for key, values in self.fixed.items()},
        }

    def canonical_name(self, name):
        """Returns the name in `tensors` of a tensor in a file, or None if it is not used."""
        return name

    def tensors(self, arguments):
        """Returns a list of `Tensor`, all tensors in a checkpoint of such a backbone."""
        v, d = arguments["vocabulary_size"], arguments["hidden_dim"]
        head, is_tied = "lm_head.weight", arguments.get("tie_word_embeddings", True)
        weights = ("token_embedding/embeddings",)
        # A copy of tied weights, which `save_pretrained` may omit.
        tensors = [Tensor(self.embedding, (v, d), weights, copy=head if is_tied else None)]
        for i in range(arguments["num_layers"]):
            block = BlockTensors(f"{self.blocks}.{i}.", f"block_{i}")
            tensors.extend(self.block_tensors(i, block, arguments))
        if self.final_norm is not None:
            tensors.append(Tensor(self.final_norm, (d,), ("final_norm/scale",)))
        if not is_tied:
            weights = ("token_embedding/reverse_embeddings",)
            tensors.append(Tensor(head, (v, d), weights, TRANSPOSED))
        return tensors

    def block_tensors(self, i, block, arguments):
        """Yields the tensors of the residual block `i`, made by a `BlockTensors`, `block`."""
        raise NotImplementedError

    def backbone_arguments(self, config, where):
        """Returns the backbone's arguments from the dictionary of `config.json`.

        Raises:
            ValueError: a key is missing, unknown, or has an unsupported value.
        """
        return self.read_arguments(ConfigReader(config, where))

    def read_arguments(self, reader):
        """Returns the backbone's arguments from a `ConfigReader`, and checks all of its keys."""
        reader.fixed("model_type", self.model_type)
        reader.ignore(*COMMON_UNUSED_KEYS, *self.unused)
        arguments = self.read_config(reader)
        reader.check_all_read()
        return arguments

    def config(self, arguments):
        """Returns the dictionary of `config.json`; reading it gives `arguments` again.

        Raises:
            ValueError: the layout cannot store the values of some arguments; names them all.
        """
        requirements = self.requirements(arguments)
        self._check(
            {name: wanted for name, (fits, wanted) in requirements.items() if not fits}, arguments
        )
        config = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **self.write_config(arguments),
        }
        again = self.backbone_arguments(config, CONFIG_FILE)
        self._check(
            {name: repr(value) for name, value in again.items() if value != arguments[name]},
            arguments,
        )
        return config

    def _check(self, unfit, arguments):
        """Raises an error if `unfit`, `{argument: requirement}`, is not empty."""
        if unfit:
            conflicts = "; ".join(
                f"`{name}` is {arguments[name]!r}, and must be {wanted}"
                for name, wanted in unfit.items()
            )
            raise ValueError(
                f"A checkpoint of the type {self.model_type!r} cannot hold this model: "
                f"{conflicts}. Save it with `save_to_preset` instead."
            )


# {model_type: (class of the backbone, layout)}. A family registers its layout when imported.
_LAYOUTS: dict = {}


def register(backbone_cls, layout):
    """Registers the checkpoint layout of a backbone.

    `from_preset` then loads directories and repositories whose `config.json` has the layout's
    `model_type`, and `export_to_transformers` writes them.

    Args:
        backbone_cls: a subclass of `keras_recurrent.models.recurrent_backbone.RecurrentBackbone`.
        layout: a `Layout`.
    """
    _LAYOUTS[layout.model_type] = (backbone_cls, layout)


def find_layout(model_type):
    """Returns `(class of the backbone, Layout)` of a `model_type`, or None if it is unknown."""
    return _LAYOUTS.get(model_type)


def get_layout(backbone):
    """Returns the `Layout` of a backbone: of several, the first that can hold it.

    Raises:
        ValueError: its family has no published layout.
    """
    layouts = [layout for cls, layout in _LAYOUTS.values() if type(backbone) is cls]
    arguments = backbone.get_config()
    for layout in layouts:
        if all(fits for fits, _ in layout.requirements(arguments).values()):
            return layout
    if layouts:
        return layouts[0]
    raise ValueError(
        f"`{type(backbone).__name__}` has no layout on the Hugging Face Hub. Save it with "
        "`save_to_preset`."
    )


def solve(function, value, guess):
    """Returns a number near `guess` for which `function` returns exactly `value`, or `guess`.

    The number has no rounding noise: short decimals are tried first.
    """
    near = (round(guess, 9), guess, math.nextafter(guess, 0), math.nextafter(guess, math.inf))
    return next((number for number in near if number and function(number) == value), guess)
