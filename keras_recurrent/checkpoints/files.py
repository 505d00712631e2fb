"""The files of a preset, from a directory or from the Hugging Face Hub."""

import collections
import importlib
import json
import os

from keras_recurrent.checkpoints.messages import short_repr

HUB = "hf://"
CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.model"
BPE_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
MAX_JSON_BYTES = 100_000_000  # as many as the safetensors format allows its headers
MAX_JSON_DEPTH = 500  # Python writes values nested up to about 1,000 levels, and reads deeper ones


def require(package, why):
    """Imports a package of the extra `huggingface`, or raises an error with the install command."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package.partition(".")[0]:
            raise
        raise ImportError(
            f"{why} takes the package {error.name!r}: the extra `huggingface` of keras-recurrent, "
            f"or pip install {error.name}"
        ) from error


def fetch(preset, name):
    """Returns the local path of the file `name` of a directory or of `hf://owner/repository`.

    Raises:
        FileNotFoundError: there is no such file.
        ConnectionError: the Hub cannot be reached, and the file is not in the local cache.
        PermissionError: the terms of the repository were not accepted.
        ValueError: the Hub has no such repository.
    """
    if not preset.startswith(HUB):
        path = os.path.join(preset, name)
        if not os.path.isfile(path):
            raise FileNotFoundError(_no_file(preset, name))
        return path
    hub = require("huggingface_hub", f"{preset!r}")
    errors = require("huggingface_hub.errors", f"{preset!r}")
    repository = preset.removeprefix(HUB)
    try:
        return hub.hf_hub_download(repo_id=repository, filename=name)
    except errors.LocalEntryNotFoundError as error:
        raise ConnectionError(
            f"{preset!r}: {name} was not fetched before, and the Hugging Face Hub cannot be "
            "reached. A name with `load_weights=False` needs no network."
        ) from error
    except errors.EntryNotFoundError as error:
        raise FileNotFoundError(_no_file(preset, name)) from error
    except errors.GatedRepoError as error:
        raise PermissionError(
            f"{preset!r} is open only after its terms are accepted. Accept them on its page of the "
            "Hugging Face Hub, then log in on this machine with `hf auth login`."
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ValueError(
            f"The Hugging Face Hub shows no repository {repository!r}. The form is "
            "'hf://owner/repository', such as 'hf://google/recurrentgemma-2b'; a private one "
            "needs `hf auth login`."
        ) from error


class PresetFiles:
    """Files of one preset. Each is fetched once in the lifetime of this object.

    Args:
        preset: string, a directory or `hf://owner/repository`.
    """

    def __init__(self, preset):
        self.preset = preset
        self._paths = {}  # {name: path, or None if there is no such file}

    def path(self, name):
        """Returns the local path of a file; raises the errors of `fetch`."""
        if name not in self._paths:
            try:
                self._paths[name] = fetch(self.preset, name)
            except FileNotFoundError:
                self._paths[name] = None
                raise
        if self._paths[name] is None:
            raise FileNotFoundError(_no_file(self.preset, name))
        return self._paths[name]

    def exists(self, name):
        """Returns True if there is a file `name`. On the Hub, the file is fetched."""
        try:
            self.path(name)
        except FileNotFoundError:
            return False
        return True

    def is_available(self, name):
        """As `exists`, but False for a file out of reach: not in the cache, without network."""
        try:
            return self.exists(name)
        except ConnectionError:
            return False

    def read_json(self, name):
        """Returns the content of a JSON file, which must be an object.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it is not JSON, not an object, or repeats a key.
        """
        path = self.path(name)
        size = os.path.getsize(path)
        if size > MAX_JSON_BYTES:
            raise ValueError(
                f"{path} has {size:,} bytes and is not read: the limit is {MAX_JSON_BYTES:,} bytes."
            )
        with open(path, "rb") as file:
            return parse_json(file.read(), path)


def parse_json(text, where):
    """Parses the bytes of a JSON file into a dictionary.

    Args:
        text: bytes.
        where: string, the file, for error messages.

    Raises:
        ValueError: it is not JSON, not an object, or an object in it repeats a key.
    """
    repeated = []

    def to_dict(pairs):
        content = dict(pairs)
        if len(content) < len(pairs):
            surplus = collections.Counter(key for key, _ in pairs) - collections.Counter(
                content.keys()
            )
            repeated.extend(surplus)
        return content

    try:
        content = json.loads(text.decode("utf-8"), object_pairs_hook=to_dict)
        too_deep = _depth(content) > MAX_JSON_DEPTH
    except RecursionError:  # of Python up to 3.11
        too_deep = True
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}. Fetch it again.") from error
    if too_deep:
        raise ValueError(f"{where} is nested too deeply to be read. Fetch it again.")
    if not isinstance(content, dict):
        raise ValueError(f"{where} must hold a JSON object; it holds a {type(content).__name__}.")
    if repeated:
        raise ValueError(
            f"{where} has the key {short_repr(repeated[0])} twice, of which only one can hold. "
            "Fetch it again."
        )
    return content


def _depth(value):
    """Returns how deeply dictionaries and lists are nested, without recursion."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, (dict, list))]:
        depth += 1
        level = [x for item in level for x in (item.values() if isinstance(item, dict) else item)]
    return depth


def _no_file(preset, name):
    return f"There is no {name} in {preset!r}."
