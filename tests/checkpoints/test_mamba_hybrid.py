"""Names of tensors in checkpoints of Nemotron-H and Mamba-2."""

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from keras_recurrent.models import MambaHybridBackbone
from tests.checkpoints import golden

pytestmark = pytest.mark.once


@pytest.mark.parametrize(
    ("source", "renamed", "extra"),
    [
        ("nemotron_h", ("backbone.", "model."), "mtp.layers.0.norm.weight"),
        ("mamba2", ("backbone.embeddings.", "backbone.embedding."), None),
    ],
)
def test_checkpoint_with_other_names_of_tensors_loads_equal_weights(
    tmp_path, source, renamed, extra
):
    """Weights of transformers' modules, of older files or next to prediction heads do not load."""
    folder = golden.DATA / f"{source}_tiny"
    shutil.copy(folder / "config.json", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    other = {name.replace(*renamed): array for name, array in tensors.items()}
    if extra:
        other[extra] = np.ones(3, "float32")
    save_file(other, tmp_path / "model.safetensors")
    found = MambaHybridBackbone.from_preset(str(tmp_path))
    golden.assert_equal_weights(found, MambaHybridBackbone.from_preset(str(folder)))
    save_file({**other, **tensors}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="twice, under the names"):
        MambaHybridBackbone.from_preset(str(tmp_path))
