"""Reader of `config.json` that raises for every key it does not know."""

import numpy as np

from keras_recurrent.checkpoints.messages import abbreviate, short_repr

REQUIRED = object()  # in place of a default: the key must be there
# Above the sizes of any model. Far larger ones would take minutes before an error.
MAX_INTEGER = 2**31 - 1
MAX_LAYERS = 10_000

# Keys that libraries write into every configuration and that do not change a model's outputs.
COMMON_UNUSED_KEYS = (
    *("architectures", "auto_map", "_name_or_path", "transformers_version"),
    *("torch_dtype", "dtype", "use_cache", "initializer_range", "init_std"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"),
    *("output_attentions", "output_hidden_states", "return_dict"),
)


class ConfigReader:
    """Reads the keys of a configuration and checks their values.

    A key with a default may be missing or null. `check_all_read` raises for keys that were not
    read: an unknown key may change the outputs of the model.

    Args:
        config: a dictionary.
        source: string, the file, for error messages.

    Attributes:
        defaults: `{key: default}` of integers, flags and lists of names that were missing or null.

    Raises:
        ValueError: in all methods, for a missing key or an unsupported value.
    """

    def __init__(self, config, source):
        self.config = config
        self.source = source
        self.unread = set(config)
        self.defaults = {}

    def integer(self, key, default=REQUIRED, multiple_of=1, maximum=MAX_INTEGER):
        """Returns an integer from 1 to `maximum`, divisible by `multiple_of`, or a default None."""
        value = self._recorded_value(key, default)
        if value is None:
            return None
        fits = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= maximum
        if not fits or value % multiple_of:
            what = "an integer" if multiple_of == 1 else f"a multiple of {multiple_of}"
            raise self.unsupported_error(
                key, value, f"{what}, at least {multiple_of}, at most {maximum}"
            )
        return value

    def values(self, table):
        """Returns `{argument: value}` for a table as in the attribute `keys` of `Layout`."""
        found = {}
        for argument, (key, default) in table.items():
            if isinstance(default, bool):
                found[argument] = self.flag(key, default)
            elif isinstance(default, float):
                found[argument] = self.number(key, default)
            else:
                default = found[default] if isinstance(default, str) else default
                maximum = MAX_LAYERS if argument == "num_layers" else MAX_INTEGER
                found[argument] = self.integer(key, default, maximum=maximum)
        return found

    def check_divides(self, key, value, other, number):
        """Raises an error unless `value`, from `key`, divides `number`, from the key `other`."""
        if number % value:
            raise self.unsupported_error(key, value, f"a divisor of {other!r}, {number}")

    def number(self, key, default=REQUIRED, maximum=None):
        """Returns a float above 0, at most `maximum`, that is neither 0 nor inf in float32."""
        value = self._value(key, default)
        least, largest = float(np.finfo("float32").tiny), float(np.finfo("float32").max)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not least <= value <= (maximum or largest):
            wanted = "a number above 0, and " + (
                f"at most {maximum}" if maximum else "finite in float32"
            )
            raise self.unsupported_error(key, value, wanted)
        return float(value)

    def rope_number(self, rope, key, default=REQUIRED, maximum=None):
        """Returns a number from `rope`, the section of rotary positions, or else from this section.

        Older files have the key in this section. If `default` is None, one of the two must have it.
        """
        outside = None
        if default is not None or self.config.get(key) is not None:
            outside = self.number(key, default=default, maximum=maximum)
        given = {} if outside is None else {"default": outside}
        inside = rope.number(key, maximum=maximum, **given)
        if self.config.get(key) is not None and inside != outside:
            raise ValueError(
                f"{key!r} is {outside} in {self.source}, but {inside} in {rope.source}. Remove the "
                "wrong one."
            )
        return inside

    def number_list(self, key, count, default=REQUIRED):
        """Returns a tuple of `count` numbers, each as in `number`."""
        values = self._value(key, default)
        if not isinstance(values, (list, tuple)) or len(values) != count:
            raise self.unsupported_error(key, values, f"a list of {count} numbers")
        parts = ConfigReader(dict(enumerate(values)), f"{key!r} of {self.source}")
        return tuple(parts.number(i) for i in range(count))

    def flag(self, key, default=REQUIRED):
        """Returns a boolean."""
        value = self._recorded_value(key, default)
        if not isinstance(value, bool):
            raise self.unsupported_error(key, value, "true or false")
        return value

    def integer_list(self, key, maximum, source=None):
        """Returns a tuple of one or more integers from 0 to `maximum`; `source` as in `fixed`."""
        value = self._value(key, REQUIRED)
        integers = isinstance(value, (list, tuple)) and all(type(v) is int for v in value)
        if not integers or not value or not all(0 <= v <= maximum for v in value):
            wanted = f"a list of integers from 0 to {maximum}" + (f", {source}" if source else "")
            raise self.unsupported_error(key, value, wanted)
        return tuple(value)

    def name_list(self, key, choices, default=REQUIRED, num_layers=None):
        """Returns a tuple of names in `choices`: one or more, or one for each of `num_layers`."""
        value = self._recorded_value(key, default)
        names = isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value)
        if not names or not value or not set(value) <= set(choices):
            wanted = f"a list of {' and '.join(map(repr, choices))}"
            raise self.unsupported_error(key, value, wanted)
        if num_layers is not None and len(value) != num_layers:
            wanted = f"a list of {num_layers} names, as many as 'num_hidden_layers'"
            raise self.unsupported_error(key, value, wanted)
        return tuple(value)

    def fixed(self, key, *values, source=None):
        """Returns the value of a key that must be missing or have one of `values`.

        `source` describes, for an error message, how other keys determine the values.
        """
        value = self._value(key, values[0])
        if value not in values or isinstance(value, bool) != isinstance(values[0], bool):
            wanted = " or ".join(map(repr, values)) + (f", {source}" if source else "")
            raise self.unsupported_error(key, value, wanted)
        return value

    def section(self, key):
        """Returns a reader of the dictionary at `key`, which may be missing."""
        value = self._value(key, {})
        if not isinstance(value, dict):
            raise self.unsupported_error(key, value, "an object")
        return ConfigReader(value, f"{key!r} of {self.source}")

    def sections(self, key):
        """Returns readers of the dictionary, or list of dictionaries, at `key`, if there is one."""
        value = self._value(key, [])
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(value, dict) for value in values):
            raise self.unsupported_error(key, value, "an object or a list of objects")
        return [ConfigReader(value, f"{key!r} of {self.source}") for value in values]

    def ignore(self, *keys):
        """Marks keys as read that do not change the model."""
        self.unread -= set(keys)

    def check_all_read(self):
        """Raises for keys that were not read."""
        if self.unread:
            keys = abbreviate([short_repr(key) for key in sorted(self.unread)])
            raise ValueError(
                f"{self.source} has {keys}, which this version does not know and so cannot honor. "
                "If it does not change the outputs of the model, remove it from the file."
            )

    def _value(self, key, default):
        self.unread.discard(key)
        value = self.config.get(key)
        if value is not None:
            return value
        if default is REQUIRED:
            raise ValueError(f"{self.source} has no {key!r}, which the model needs.")
        return default

    def _recorded_value(self, key, default):
        value = self._value(key, default)
        if self.config.get(key) is None and value is not None:
            self.defaults[key] = value
        return value

    def unsupported_error(self, key, value, wanted):
        """Returns the error for an unsupported value of a key; the value may be the default."""
        state = "is missing" if value is None else f"is {short_repr(value)}"
        message = f"{key!r} {state} in {self.source}; this version supports {wanted}."
        return ValueError(message + self.defaults_note(message))

    def defaults_note(self, message=None):
        """Returns a sentence on the defaults of missing keys, or an empty string.

        message: string, an error message. The sentence only lists keys that the message names. If
        None, it lists all.
        """
        defaults = [
            f"{key!r} is {short_repr(value)}"
            for key, value in self.defaults.items()
            if message is None or repr(key) in message
        ]
        note = f" Keys that {self.source} lacks have default values: {abbreviate(defaults, 8)}."
        return note if defaults else ""
