"""Tokenizers and chat templates of checkpoints, in the files that transformers reads and writes."""

import json
import os
from typing import Any

from keras_recurrent.checkpoints import files
from keras_recurrent.checkpoints.messages import short_repr
from keras_recurrent.tokenizers import BPETokenizer, SentencePieceTokenizer
from keras_recurrent.tokenizers.bpe_file import read_bpe_file
from keras_recurrent.tokenizers.checkpoint_files import describe_errors

TEMPLATE_FILE = "chat_template.jinja"
MAX_TEMPLATE_BYTES = 1_000_000
# {argument of the tokenizer: beginning of the keys of files}
NAMES = {"start_token_id": "bos_token", "end_token_id": "eos_token", "pad_token_id": "pad_token"}


class TokenizerFiles:
    """Tokenizer, chat template and end tokens of a checkpoint.

    `tokenizer.model` of SentencePiece takes precedence over `tokenizer.json`, which is a conversion
    of it in repositories with both.

    Args:
        preset_files: the `PresetFiles`.
        config: the dictionary of `config.json`.
    """

    def __init__(self, preset_files, config):
        self._files = preset_files
        self._configs = {files.CONFIG_FILE: config}

    def exist(self):
        """Returns True if there is a tokenizer. On the Hub, its file is fetched."""
        return any(map(self._files.exists, (files.TOKENIZER_FILE, files.BPE_FILE)))

    def load(self, **kwargs):
        """Returns the tokenizer.

        Special tokens of `tokenizer.model` are given by `config.json`, and those that are not in
        the file by `added_tokens_decoder` of `tokenizer_config.json`. Special tokens of
        `tokenizer.json` are given by the first file that has them: `tokenizer_config.json`,
        `special_tokens_map.json`, `config.json` or `generation_config.json`. A start token that is
        null in one of the first two files does not exist.

        Args:
            **kwargs: arguments of the tokenizer.

        Raises:
            FileNotFoundError: there is no file of a tokenizer.
            ValueError: a file is damaged or has an unsupported content.
        """
        if self._files.exists(files.TOKENIZER_FILE) or not self._files.exists(files.BPE_FILE):
            path = self._files.path(files.TOKENIZER_FILE)
            ids = {name: self._ids(files.CONFIG_FILE, f"{key}_id") for name, key in NAMES.items()}
            given = {name: found[0] for name, found in ids.items() if found}
            given["added_tokens"] = self._added_tokens()
            with open(path, "rb") as file:
                proto = file.read()
            with describe_errors(path):
                return SentencePieceTokenizer(proto, **{**given, **kwargs})
        path = self._files.path(files.BPE_FILE)
        with describe_errors(path):
            bpe = read_bpe_file(path)
        missing = NAMES.keys() - kwargs.keys()
        ids = {name: self._find_bpe_id(name, NAMES[name], bpe) for name in sorted(missing)}
        with describe_errors(path):
            return BPETokenizer(bpe, **{**ids, **kwargs})

    def read_chat_template(self):
        """Returns the chat template of a checkpoint, or None.

        That is `chat_template.jinja`, or `chat_template` of `tokenizer_config.json`: a string, or a
        list of named templates, of which the one named "default" is taken.

        Raises:
            ValueError: it has another form, or more than 1 MB.
        """
        if self._files.is_available(TEMPLATE_FILE):
            where = self._files.path(TEMPLATE_FILE)
            if os.path.getsize(where) > MAX_TEMPLATE_BYTES:
                raise ValueError(f"{where} has more than 1 MB and is not read.")
            with open(where, encoding="utf-8", newline="") as file:
                template: Any = file.read()
        elif self._files.is_available(files.TOKENIZER_CONFIG_FILE):
            where = f"'chat_template' in {self._where(files.TOKENIZER_CONFIG_FILE)}"
            template = self._config(files.TOKENIZER_CONFIG_FILE).get("chat_template")
            if isinstance(template, list):
                named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
                template = named.get("default")
            if template is None:
                return None
        else:
            return None
        if not isinstance(template, str) or not template:
            raise ValueError(
                f"{where} must be a jinja2 template, a string that is not empty, or a list of "
                f"templates with one named 'default'; got {short_repr(template)}."
            )
        return template

    def read_stop_token_ids(self):
        """Returns the ids of `eos_token_id` in `config.json` and `generation_config.json`."""
        names = [files.CONFIG_FILE]
        if self._files.is_available(files.GENERATION_CONFIG_FILE):
            names.append(files.GENERATION_CONFIG_FILE)
        ids = [id for name in names for id in self._ids(name, "eos_token_id")]
        return tuple(dict.fromkeys(ids))

    def _added_tokens(self):
        """Returns `{token: id}` of the special tokens in `tokenizer_config.json`."""
        name, key = files.TOKENIZER_CONFIG_FILE, "added_tokens_decoder"
        entries = self._config(name).get(key) if self._files.is_available(name) else None
        try:
            entries = {int(id): dict(entry) for id, entry in (entries or {}).items()}
            return {entry["content"]: id for id, entry in entries.items() if entry.get("special")}
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValueError(
                f"{key!r} is {short_repr(entries)} in {self._where(name)}; it must be an object of "
                "token ids, each with an object that has the 'content' of the token."
            ) from None

    def _find_bpe_id(self, name, key, bpe):
        for file in (files.TOKENIZER_CONFIG_FILE, "special_tokens_map.json"):
            config = self._config(file)
            token = config.get(key)
            if isinstance(token, dict):
                token = token.get("content")
            if token is None and not (name == "start_token_id" and key in config):
                continue
            if token is not None and (not isinstance(token, str) or token not in bpe.ids):
                raise ValueError(
                    f"{key!r} is {short_repr(config[key])} in {self._where(file)}; it must be a "
                    f"token of {files.BPE_FILE}."
                )
            return bpe.ids.get(token)
        for file in (files.CONFIG_FILE, files.GENERATION_CONFIG_FILE):
            if ids := self._ids(file, f"{key}_id"):
                return ids[0]
        return None

    def _config(self, name):
        """Returns the content of a JSON file, or an empty dictionary if there is no such file."""
        if name not in self._configs:
            exists = self._files.exists(name)
            self._configs[name] = self._files.read_json(name) if exists else {}
        return self._configs[name]

    def _ids(self, file, key):
        """Returns a list of the token ids of a key, with none for a missing or null key.

        If several tokens end a text, the first is the one that ends a document in training.
        """
        value = self._config(file).get(key)
        ids = value if isinstance(value, list) else [value] if value is not None else []
        if not all(type(id) is int and id >= 0 for id in ids):
            raise ValueError(
                f"{key!r} is {short_repr(value)} in {self._where(file)}; it must be an integer of "
                "at least 0, or a list of them."
            )
        return ids

    def _where(self, file):
        return f"{file} of {self._files.preset!r}"


def write(folder, tokenizer, family):
    """Writes the files of a tokenizer; returns the special tokens for `config.json`.

    Args:
        folder: string, a directory.
        tokenizer: a `SentencePieceTokenizer` or `BPETokenizer`. Another tokenizer, or None, writes
            no file.
        family: the `Layout`.
    """
    if getattr(tokenizer, "proto", None) is not None:
        name, content = files.TOKENIZER_FILE, tokenizer.proto
        tokenizer_class = family.tokenizer_class
    elif getattr(tokenizer, "tokenizer_json", None) is not None:
        name, content = files.BPE_FILE, tokenizer.tokenizer_json
        tokenizer_class = "PreTrainedTokenizerFast"
    else:
        return {}
    with open(os.path.join(folder, name), "wb") as file:
        file.write(content)
    ids = {key: getattr(tokenizer, argument) for argument, key in NAMES.items()}
    tokens = {key: None if id is None else tokenizer.id_to_token(id) for key, id in ids.items()}
    content = {"tokenizer_class": tokenizer_class, **tokens}
    if added_tokens := getattr(tokenizer, "added_tokens", None):
        rest = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
        content["added_tokens_decoder"] = {
            str(id): {"content": token, "special": True, **rest}
            for token, id in added_tokens.items()
        }
    write_json(folder, files.TOKENIZER_CONFIG_FILE, content)
    return {f"{key}_id": int(id) for key, id in ids.items() if id is not None}


def write_json(folder, name, content):
    """Writes a JSON file into a directory."""
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, sort_keys=True)
        file.write("\n")
