"""A `config.json`, read key by key, so that none of it is overlooked."""

import numpy as np

from keras_recurrent.checkpoints.messages import listed, shown

_REQUIRED = object()
# Above what any model has, and below what takes minutes to find out.
MOST = 2**31 - 1
MOST_LAYERS = 10_000

# Keys that libraries write into any configuration, and that do not change what a model computes.
UNUSED_ANYWHERE = (
    *("architectures", "auto_map", "_name_or_path", "transformers_version"),
    *("torch_dtype", "dtype", "use_cache", "initializer_range", "init_std"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"),
    *("output_attentions", "output_hidden_states", "return_dict"),
)


class ConfigReader:
    """Reads the keys of a configuration and checks their values.

    A key with a default may be missing or null. Whatever is left unread at `done` is an error: a
    key that is not known may change what the model computes.

    Args:
        config: a dictionary.
        where: string, the file, for the errors.

    Raises:
        ValueError: in all methods, for a key that is missing or a value that is not served.
    """

    def __init__(self, config, where):
        self.config = config
        self.where = where
        self.unread = set(config)

    def integer(self, key, default=_REQUIRED, multiple_of=1, most=MOST):
        """An integer from 1 to `most`."""
        value = self._value(key, default)
        fits = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most
        if not fits or value % multiple_of:
            what = "an integer" if multiple_of == 1 else f"a multiple of {multiple_of}"
            raise self.unsupported(key, value, f"{what}, at least {multiple_of}, at most {most}")
        return value

    def number(self, key, default=_REQUIRED, most=None):
        """A number above 0, at most `most`, as a float; not one that is 0 or inf in float32."""
        value = self._value(key, default)
        least, largest = float(np.finfo("float32").tiny), float(np.finfo("float32").max)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not least <= value <= (most or largest):
            wanted = "a number above 0, and " + (f"at most {most}" if most else "finite in float32")
            raise self.unsupported(key, value, wanted)
        return float(value)

    def flag(self, key, default=_REQUIRED):
        """True or False."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.unsupported(key, value, "true or false")
        return value

    def list_of(self, key, choices, default=_REQUIRED):
        """A list of some of the names in `choices`, not empty."""
        value = self._value(key, default)
        names = isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value)
        if not names or not value or not set(value) <= set(choices):
            wanted = f"a list of {' and '.join(map(repr, choices))}"
            raise self.unsupported(key, value, wanted)
        return tuple(value)

    def only(self, key, *values):
        """A key that must be missing or have one of the values: no other model is built here."""
        value = self._value(key, values[0])
        if value not in values or isinstance(value, bool) != isinstance(values[0], bool):
            raise self.unsupported(key, value, " or ".join(map(repr, values)))
        return value

    def section(self, key):
        """A reader of the dictionary at `key`, which may be missing."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self.unsupported(key, value, "an object")
        return ConfigReader(value, f"{key!r} of {self.where}")

    def unused(self, *keys):
        """Marks keys as read that change nothing in the model."""
        self.unread -= set(keys)

    def done(self):
        """Raises for keys that were not read."""
        if self.unread:
            keys = listed([shown(key) for key in sorted(self.unread)])
            raise ValueError(
                f"{self.where} has {keys}, which this version does not know and so cannot honor. "
                "If it changes nothing in what the model computes, take it out of the file."
            )

    def _value(self, key, default):
        self.unread.discard(key)
        value = self.config.get(key)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ValueError(f"{self.where} says nothing of {key!r}, which the model needs.")
        return default

    def unsupported(self, key, value, wanted):
        """The error for a value of a key."""
        return ValueError(
            f"{key!r} is {shown(value)} in {self.where}; this version serves {wanted}."
        )
