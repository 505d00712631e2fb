"""Layouts of models over a mesh of devices: results of one device, and expected communication."""

import keras
import pytest

from keras_recurrent import models
from tests.devices.meshes import device_mesh, model_parallel
from tests.devices.processes import run_on_simulated_devices
from tests.models.tiny import FAMILIES, HYBRID, any_family, tiny_backbone

pytestmark = pytest.mark.skipif(
    keras.config.backend() != "jax", reason="Keras splits models over devices on JAX alone"
)


MESHES = ("8,1", "4,2", "2,4", "1,8")
CASES = [f"{family}:{sizes}" for family in FAMILIES for sizes in MESHES]
CASES += ["griffin:2,4:8", "griffin:2,4:2", "griffin:4,2:2"]
# The tokens of a sequence are on several devices, too.
CASES += [
    f"{family}:{sizes}"
    for family in ("griffin", "hgrn2", "transnormer")
    for sizes in ("1,8,1", "2,2,2", "1,4,2")
]


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_training_and_generation_on_a_mesh_match_one_device(tmp_path, case):
    """Losses, weights or tokens differ, or a device sends or holds more than the layout says."""
    dump_flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    run_on_simulated_devices(
        *(8, "jax_layouts", tmp_path, case),
        flags=f"{dump_flags} --xla_dump_hlo_module_re=.*train_step.*",
        JAX_ENABLE_COMPILATION_CACHE="0",  # cached programs are not dumped
    )


HEADS = {
    "griffin": ("num_blocks", 4),
    "hgrn2": ("num_heads", 4),
    "transnormer": ("num_heads", 3),
    "lightning_hybrid": ("num_lightning_heads", 4),
    "mamba_hybrid": ("num_mamba_heads", 4),
    "lfm2": ("num_query_heads", 4),
}


@any_family
def test_sizes_that_devices_do_not_divide_raise_before_weights_are_made(family):
    cls, (name, heads) = FAMILIES[family].backbone, HEADS[family]
    sizes = {"vocabulary_size": 64, "intermediate_dim": 40, "lru_width": 24}
    sizes = {name: size for name, size in sizes.items() if name in FAMILIES[family].sizes}
    expected = [
        ({}, "`token_embedding/embeddings` is split .*, `vocabulary_size=64`"),
        (sizes, f"block_[01]/temporal.*`{name}`, {heads}[.] Take a"),
        ({**sizes, "intermediate_dim": 44}, "mlp/gate_proj/kernel` is .* `intermediate_dim`, 44"),
    ]
    with model_parallel(cls.get_layout_map(device_mesh(1, 8))):
        for arguments, message in expected:
            with pytest.raises(ValueError, match=message):
                tiny_backbone(family=family, **arguments)
    message = "axis 'batch' of .*, 3, does not divide `hidden_dim`, 16"
    layout_map = cls.get_layout_map(device_mesh(3, 1))
    with model_parallel(layout_map), pytest.raises(ValueError, match=message):
        tiny_backbone(family=family)


@pytest.mark.parametrize(("sizes", "axis"), [((1, 4, 2), "sequence"), ((2, 2, 2), "batch")])
@any_family
def test_layout_map_splits_weights_along_sequence_if_batch_has_one_device(family, sizes, axis):
    layout_map = FAMILIES[family].backbone.get_layout_map(device_mesh(*sizes))
    assert layout_map["block_1/mlp/up_proj/kernel"].axes == (axis, "model")
    assert layout_map["token_embedding/embeddings"].axes == ("model", axis)
    assert layout_map["hidden_states"].axes == ("batch", "sequence", None)


@pytest.mark.parametrize(
    ("cls", "sizes"),
    [
        (models.GriffinBackbone, FAMILIES["griffin"].sizes),
        (models.HGRN2Backbone, {**FAMILIES["hgrn2"].sizes, **HYBRID}),
    ],
)
def test_layout_map_splits_keys_and_values_if_devices_divide_their_heads(cls, sizes):
    mesh = device_mesh(1, 4)
    for heads, axis in ((1, None), (2, None), (4, "model"), (8, "model")):
        layout_map = cls.get_layout_map(mesh, num_key_value_heads=heads)
        assert layout_map["block_0/temporal_block/k_proj/kernel"].axes == ("batch", axis)
    assert layout_map["block_0/temporal_block/q_proj/kernel"].axes == ("batch", "model")
    message = "k_proj/kernel` is .* `num_key_value_heads`, 2"
    with model_parallel(layout_map), pytest.raises(ValueError, match=message):
        cls(**{**sizes, "vocabulary_size": 64, "num_key_value_heads": 2})
