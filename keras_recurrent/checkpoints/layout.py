"""What a family says about its published checkpoints, and the layouts of all families."""

from keras_recurrent.checkpoints.config_reader import UNUSED_ANYWHERE, ConfigReader
from keras_recurrent.checkpoints.files import CONFIG_FILE


class Layout:
    """The layout of one family's checkpoints on the Hugging Face Hub.

    A family defines the attributes, `read_config`, `requirements`, `write_config` and `tensors`;
    reading, writing and their checks are the same for all.

    Attributes:
        model_type: string, of `config.json`.
        architecture: string, the class that transformers loads.
        tokenizer_class: string, the same for a SentencePiece tokenizer.
        unused: keys of `config.json` that do not change what the model computes, beside
            `UNUSED_ANYWHERE`.
    """

    model_type: str
    architecture: str
    tokenizer_class: str
    unused: tuple[str, ...] = ()

    def read_config(self, config):
        """The backbone's arguments, from a `ConfigReader`."""
        raise NotImplementedError

    def requirements(self, arguments):
        """What the layout has no key for, or not for every value.

        Returns:
            A dictionary of names of the backbone's arguments, each with a pair: whether the value
            in `arguments` fits, and what it must be, in words.
        """
        return {}

    def write_config(self, arguments):
        """The dictionary of `config.json`, from arguments that meet the `requirements`."""
        raise NotImplementedError

    def tensors(self, arguments):
        """A list of `Tensor`, all that a checkpoint of such a backbone holds."""
        raise NotImplementedError

    def backbone_arguments(self, config, where):
        """The backbone's arguments, from a dictionary; every key is read.

        Raises:
            ValueError: a key is missing, unknown, or has a value that this version does not serve.
        """
        reader = ConfigReader(config, where)
        reader.only("model_type", self.model_type)
        reader.unused(*UNUSED_ANYWHERE, *self.unused)
        arguments = self.read_config(reader)
        reader.done()
        return arguments

    def config(self, arguments):
        """The dictionary of `config.json`, which read again gives `arguments`.

        Raises:
            ValueError: the layout has no key for the value of an argument; names all such.
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
        """Raises for `{argument: what it must be}`, where there are any."""
        if unfit:
            said = "; ".join(
                f"`{name}` is {arguments[name]!r}, and must be {wanted}"
                for name, wanted in unfit.items()
            )
            raise ValueError(
                f"A checkpoint of the type {self.model_type!r} cannot hold this model: {said}. "
                "Save it with `save_to_preset` instead."
            )


# {model_type: (class of the backbone, layout)}, to which each family adds its own when imported.
_LAYOUTS: dict = {}


def register(backbone_cls, layout):
    """Lets models of a backbone be read from and written to checkpoints of a layout.

    `from_preset` then takes directories and repositories whose `config.json` has the layout's
    `model_type`, and `export_to_transformers` writes them.

    Args:
        backbone_cls: a subclass of `keras_recurrent.models.recurrent_backbone.RecurrentBackbone`.
        layout: a `Layout`.
    """
    _LAYOUTS[layout.model_type] = (backbone_cls, layout)


def of_model_type(model_type):
    """`(class of the backbone, Layout)` of a `model_type` of `config.json`; None: not known."""
    return _LAYOUTS.get(model_type)


def of_backbone(backbone):
    """The `Layout` of a backbone.

    Raises:
        ValueError: its family has no published layout.
    """
    for backbone_cls, layout in _LAYOUTS.values():
        if type(backbone) is backbone_cls:
            return layout
    raise ValueError(
        f"`{type(backbone).__name__}` has no layout on the Hugging Face Hub. Save it with "
        "`save_to_preset`."
    )
