"""A tiny RecurrentGemma in the published layout, with the outputs of independent programs.

`golden.npz` was made with DeepMind's recurrentgemma 1.0.1 on torch, in float32.
"""

import json
import pathlib
import shutil

import keras
import numpy as np
from safetensors.numpy import load_file, save_file

from keras_recurrent.models import GriffinCausalLM

PATH = pathlib.Path(__file__).parents[1] / "data" / "recurrentgemma_tiny"
TENSORS = PATH / "model.safetensors"


def arrays():
    with np.load(PATH / "golden.npz") as file:
        return dict(file)


def model(path=PATH, **kwargs):
    return GriffinCausalLM.from_preset(str(path), **kwargs)


def inputs(token_ids, **more):
    return {"token_ids": token_ids, "padding_mask": np.ones_like(token_ids), **more}


def logits(model, token_ids, **more):
    return keras.ops.convert_to_numpy(model.predict_on_batch(inputs(token_ids, **more)))


def relative(found, wanted):
    """The root mean square of an error, over that of what is wanted."""
    error = found.astype("float64") - wanted
    return np.sqrt((error**2).mean() / (wanted.astype("float64") ** 2).mean())


def copy(folder, config=None, tensors=None, drop=()):
    """The checkpoint somewhere else, with other configuration keys and tensors (None: none)."""
    folder.mkdir(exist_ok=True)
    content = {**json.loads((PATH / "config.json").read_text()), **(config or {})}
    content = {key: value for key, value in content.items() if key not in drop}
    (folder / "config.json").write_text(json.dumps(content))
    if tensors is None:
        shutil.copy(TENSORS, folder)
    else:
        changed = {**load_file(TENSORS), **tensors}
        kept = {name: array for name, array in changed.items() if array is not None}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
