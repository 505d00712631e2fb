"""Layouts of models over a mesh of devices: the same numbers as on one, and what is sent."""

import os

import keras
import pytest

from keras_recurrent import models
from tests.devices.programs import collectives
from tests.models.tiny import FAMILIES, HYBRID, any_family, tiny_backbone
from tests.processes import fresh_process

pytestmark = pytest.mark.skipif(
    keras.config.backend() != "jax", reason="Keras splits models over devices on JAX alone"
)


def compare(folder, writes, *cases):
    flags = (
        "--xla_force_host_platform_device_count=8",
        f"--xla_dump_to={folder}",
        "--xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*train_step.*",
    )
    reports = fresh_process(
        *("-m", "tests.devices.jax_layouts", folder, "writes" if writes else "trains", *cases),
        XLA_FLAGS=" ".join((os.environ["XLA_FLAGS"], *flags)),
        JAX_ENABLE_COMPILATION_CACHE="0",  # programs from there are not dumped
        JAX_PLATFORMS="cpu",
    )
    assert set(reports) == set(cases)
    for case, report in reports.items():
        assert report["unplanned"] == [], case
        assert report["losses"] < 2e-6, case
        assert report["arrays"][0] < 1e-6, (case, report["arrays"])
        assert report["same tokens"], case
        assert report["bytes"] == report["said bytes"], case
    return reports


@pytest.mark.nightly
@any_family
def test_steps_on_eight_devices_are_those_of_one(tmp_path, family):
    """FSDP by two and tensor parallelism by four, or parts of rows by two; one family writes."""
    case = f"{family}:2,2,2" if family == "griffin" else f"{family}:2,4"
    states = compare(tmp_path, family == "hgrn2", case)[case]["states"]
    if family == "griffin":
        assert (states["hidden"], states["inputs"]) == ([8, 32], [8, 3, 32])
        assert states["key"] == [8, 5, 1, 8]
    else:
        assert states["memory"] == [8, 2, 4, 4]


GRID = [
    f"{case}:{sizes}"
    for case in ("griffin", "hgrn2", "transnormer", "lightning_hybrid")
    for sizes in ("8,1", "4,2", "2,4", "1,8")
]


@pytest.mark.nightly
@pytest.mark.parametrize("case", [*GRID, "griffin:2,4:8", "griffin:2,4:2", "griffin:4,2:2"])
def test_training_and_writing_on_every_mesh(tmp_path, case):
    report = compare(tmp_path, True, case)[case]
    if case == "griffin:4,2:2":
        assert report["states"]["key"] == [4, 5, 1, 8]


def test_programs_are_read():
    """The judge of the tests above, on a program with a loop."""
    text = """
%body (p: (s32[], f32[4,2])) -> (s32[], f32[4,2]) {
  %r = f32[4,2]{1,0} all-reduce(f32[4,2] %x), to_apply=%add, metadata={op_name="jit(f)/psum"}
}
%condition (p: (s32[], f32[4,2])) -> pred[] {
}
ENTRY %main (a: f32[4,2]) -> f32[4,2] {
  %g = (f32[8,2]{1,0}, bf16[3]{0}) all-gather(f32[4,2] %a, bf16[1] %b), dimensions={0}
  %o = f32[4,2]{1,0} all-reduce(f32[4,2] %a), replica_groups={{0},{1}}, to_apply=%add
  %p = f32[4,2]{1,0} all-reduce(f32[4,2] %a), replica_groups=[2,1]<=[2], to_apply=%add
  %w = (s32[], f32[4,2]) while((s32[], f32[4,2]) %t), condition=%condition, body=%body
}
"""
    reduced, gathered, also = collectives(text)
    assert reduced == ("all-reduce", (4, 2), 32, True, "jit(f)/psum")
    assert gathered == ("all-gather", (8, 2), 64, False, "")
    assert also[1:3] == ((3,), 6)


@any_family
def test_what_devices_do_not_divide_is_refused_by_name(family):
    """Before any weight is made: a mesh needs no devices for that."""
    cls = FAMILIES[family].backbone
    mesh = keras.distribution.DeviceMesh((1, 8), ("batch", "model"), [f"cpu:{i}" for i in range(8)])
    heads = {
        "griffin": ("num_blocks", 4),
        "hgrn2": ("num_heads", 4),
        "transnormer": ("num_heads", 3),
        "lightning_hybrid": ("num_lightning_heads", 4),
    }[family]
    fine = {"vocabulary_size": 64, "intermediate_dim": 40, "lru_width": 24}
    fine = {name: size for name, size in fine.items() if name in FAMILIES[family].sizes}
    expected = [
        ({}, "`token_embedding/embeddings` is split .*, `vocabulary_size=64`"),
        (fine, f"block_0/temporal.*`{heads[0]}`, {heads[1]}[.] Take a"),
        ({**fine, "intermediate_dim": 44}, "mlp/gate_proj/kernel` is .* `intermediate_dim`, 44"),
    ]
    with keras.distribution.ModelParallel(layout_map=cls.get_layout_map(mesh)).scope():
        for sizes, message in expected:
            with pytest.raises(ValueError, match=message):
                tiny_backbone(family=family, **sizes)
    mesh = keras.distribution.DeviceMesh((3, 1), ("batch", "model"), [f"cpu:{i}" for i in range(3)])
    distribution = keras.distribution.ModelParallel(layout_map=cls.get_layout_map(mesh))
    message = "axis 'batch' of .*, 3, does not divide `hidden_dim`, 16"
    with distribution.scope(), pytest.raises(ValueError, match=message):
        tiny_backbone(family=family)


def test_weights_are_split_along_the_sequence_where_there_is_one_row_of_devices():
    for sizes, axis in (((1, 4, 2), "sequence"), ((2, 2, 2), "batch")):
        names = ("batch", "sequence", "model")
        mesh = keras.distribution.DeviceMesh(sizes, names, [f"cpu:{i}" for i in range(8)])
        for family in FAMILIES.values():
            layout_map = family.backbone.get_layout_map(mesh)
            assert layout_map["block_1/mlp/up_proj/kernel"].axes == (axis, "model")
            assert layout_map["token_embedding/embeddings"].axes == ("model", axis)
            assert layout_map["hidden_states"].axes == ("batch", "sequence", None)


def test_keys_and_values_are_split_where_their_heads_can_be():
    mesh = keras.distribution.DeviceMesh((1, 4), ("batch", "model"), [f"cpu:{i}" for i in range(4)])
    for cls in (models.GriffinBackbone, models.HGRN2Backbone):
        for heads, axis in ((1, None), (2, None), (4, "model"), (8, "model")):
            layout_map = cls.get_layout_map(mesh, num_key_value_heads=heads)
            assert layout_map["block_0/temporal_block/k_proj/kernel"].axes == ("batch", axis)
        assert layout_map["block_0/temporal_block/q_proj/kernel"].axes == ("batch", "model")
        family = "griffin" if cls is models.GriffinBackbone else "hgrn2"
        sizes = {**FAMILIES[family].sizes, **({} if family == "griffin" else HYBRID)}
        distribution = keras.distribution.ModelParallel(layout_map=layout_map)
        message = "k_proj/kernel` is .* `num_key_value_heads`, 2"
        with distribution.scope(), pytest.raises(ValueError, match=message):
            cls(**{**sizes, "vocabulary_size": 64, "num_key_value_heads": 2})
