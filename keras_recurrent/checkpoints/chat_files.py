"""Chat template and end tokens of a checkpoint, in the files that transformers reads and writes."""

import os

from keras_recurrent.checkpoints import files
from keras_recurrent.checkpoints.messages import short_repr

TEMPLATE_FILE = "chat_template.jinja"
MAX_TEMPLATE_BYTES = 1_000_000


def read_chat_template(preset_files):
    """Returns the chat template of a checkpoint, or None.

    That is `chat_template.jinja`, or `chat_template` of `tokenizer_config.json`: a string, or a
    list of named templates, of which the one named "default" is taken.

    Raises:
        ValueError: it has another form, or more than 1 MB.
    """
    if preset_files.is_available(TEMPLATE_FILE):
        path = preset_files.path(TEMPLATE_FILE)
        if os.path.getsize(path) > MAX_TEMPLATE_BYTES:
            raise ValueError(f"{path} has more than 1 MB and is not read.")
        with open(path, encoding="utf-8", newline="") as file:
            return _checked(file.read(), path)
    if not preset_files.is_available(files.TOKENIZER_CONFIG_FILE):
        return None
    found = preset_files.read_json(files.TOKENIZER_CONFIG_FILE).get("chat_template")
    where = f"'chat_template' in {files.TOKENIZER_CONFIG_FILE} of {preset_files.preset!r}"
    if isinstance(found, list):
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
    return None if found is None else _checked(found, where)


def _checked(template, where):
    if not isinstance(template, str) or not template:
        raise ValueError(
            f"{where} must be a jinja2 template, a string that is not empty, or a list with one "
            f"of the name 'default'; got {short_repr(template)}."
        )
    return template


def read_stop_token_ids(preset_files, config):
    """Returns the ids of `eos_token_id` in `generation_config.json` and in `config`, a tuple.

    config: the dictionary of `config.json`.

    Raises:
        ValueError: one is neither an integer of at least 0 nor a list of them.
    """
    configs = {files.CONFIG_FILE: config}
    if preset_files.is_available(files.GENERATION_CONFIG_FILE):
        configs[files.GENERATION_CONFIG_FILE] = preset_files.read_json(files.GENERATION_CONFIG_FILE)
    found = []
    for name, content in configs.items():
        ids = content.get("eos_token_id")
        for id in ids if isinstance(ids, list) else [ids] if ids is not None else []:
            if not isinstance(id, int) or isinstance(id, bool) or id < 0:
                raise ValueError(
                    f"'eos_token_id' is {short_repr(ids)} in {name} of {preset_files.preset!r}; "
                    "it must be an integer of at least 0, or a list of them."
                )
            found.append(id)
    return tuple(dict.fromkeys(found))


def write_chat_template(folder, template):
    with open(os.path.join(folder, TEMPLATE_FILE), "w", encoding="utf-8", newline="") as file:
        file.write(template)
