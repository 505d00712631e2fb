"""Decoding steps of blocks on the devices of a mesh: their communication, and their tokens."""

import os

import keras
import numpy as np
import pytest

from keras_recurrent import dispatch
from keras_recurrent.layers import HGRN2, LightningAttention, decoding
from tests.models.tiny import HYBRID, tiny_backbone
from tests.processes import fresh_process

if keras.config.backend() == "jax":
    import jax
    from jax.extend.core import jaxprs_in_params

pytestmark = pytest.mark.skipif(
    keras.config.backend() != "jax", reason="Keras splits models over devices on JAX alone"
)
# {family: further arguments of the backbone, and those of its layout map}
CASES: dict = {
    "griffin": ({}, {"num_key_value_heads": 2}),
    "hgrn2": (HYBRID, {"num_key_value_heads": 2}),
    "lightning_hybrid": ({}, {"attention_layers": (1,), "num_key_value_heads": 2}),
}


@pytest.fixture
def mesh(monkeypatch):
    """A mesh of two devices, for tracing: it needs none of them. Fused steps are taken."""
    monkeypatch.setattr(dispatch, "decodes_with_kernels", lambda tensor: True)
    names, auto = ("batch", "model"), (jax.sharding.AxisType.Auto,) * 2  # as Keras's meshes
    of_jax = jax.sharding.AbstractMesh((1, 2), names, axis_types=auto)
    monkeypatch.setattr(keras.distribution.DeviceMesh, "backend_mesh", of_jax)
    return keras.distribution.DeviceMesh((1, 2), names, ["cpu:0", "cpu:1"])


def sent(jaxpr):
    """The collectives of a traced program, as pairs of a kind and a shape."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("psum", "all_gather", "all_to_all", "ppermute"):
            found += [(equation.primitive.name, x.aval.shape) for x in equation.invars]
        for inner in jaxprs_in_params(equation.params):
            found += sent(inner)
    return found


@pytest.mark.parametrize("family", CASES)
def test_a_block_sends_two_sums_per_token(family, mesh):
    """Fails if a step gathers weights or states, or its norm over all heads needs another sum."""
    sizes, layout = CASES[family]
    backbone = tiny_backbone(family=family, **sizes)
    blocks = backbone.transformer_layers
    states = [block.get_initial_state(3, max_length=8) for block in blocks]
    x = np.ones((3, 1, backbone.hidden_dim), "float32")
    arguments = backbone.block_arguments(x)
    layout_map = type(backbone).get_layout_map(mesh, **layout)

    def step(block, x, state, further):
        with decoding.decoding_scope():
            return block(x, initial_state=state, return_state=True, **further)

    with keras.distribution.ModelParallel(layout_map=layout_map).scope():
        for block, state, further in zip(blocks, states, arguments, strict=True):
            traced = jax.make_jaxpr(step, static_argnums=0)(block, x, state, further)
            width = backbone.hidden_dim
            # The squares of a norm over all heads are added up together with the outputs.
            has_norm = isinstance(block.temporal_block, (HGRN2, LightningAttention))
            expected = [("psum", (3, width + has_norm)), ("psum", (3, width))]
            assert sent(traced.jaxpr) == expected, block.name


def test_an_embedding_sends_one_sum_per_token(mesh):
    """Fails if XLA decides how to split the table: it gathers all of it for a single token."""
    backbone = tiny_backbone(vocabulary_size=260)
    layout_map = backbone.get_layout_map(mesh)
    token_ids = np.ones((1, 1), "int32")

    def embed(token_ids):
        with decoding.decoding_scope():
            return backbone.token_embedding(token_ids)

    with keras.distribution.ModelParallel(layout_map=layout_map).scope():
        traced = jax.make_jaxpr(embed)(token_ids)
    assert sent(traced.jaxpr) == [("psum", (1, 1, backbone.hidden_dim))]


def test_top_logits_under_data_parallelism_are_the_largest():
    """Fails if `top_k` and `logprobs` raise an error where no mesh axis splits the vocabulary."""
    x = keras.ops.arange(6.0)[None]
    with keras.distribution.DataParallel(devices=["cpu:0"]).scope():
        values, ids, _ = dispatch.run("top_logits", {"x": x, "count": 2})
    assert (values.tolist(), ids.tolist()) == ([[5, 4]], [[5, 4]])


def test_blocks_that_devices_cannot_share_say_why(mesh):
    """Fails if a step computes queries with the keys of other heads, or gathers FSDP's weights."""
    backbone = tiny_backbone()
    names, devices = ("batch", "model"), [f"cpu:{i}" for i in range(4)]
    foreign = keras.distribution.LayoutMap(mesh)
    foreign["block_1/mlp/down_proj/kernel"] = ("model", None)
    swapped = {"data_parallel_dim_name": "model", "model_parallel_dim_name": "batch"}
    fsdp = keras.distribution.DeviceMesh((2, 2), names, devices)
    layouts = (
        ("2 heads of keys and values, which are not split", backbone.get_layout_map(mesh)),
        ("must be from `get_layout_map`", foreign),
        ("with 'batch' as `data_parallel_dim_name`", backbone.get_layout_map(mesh, **swapped)),
        ("['batch', 'model']", backbone.get_layout_map(fsdp, num_key_value_heads=2)),
    )
    for reason, layout_map in layouts:
        with keras.distribution.ModelParallel(layout_map=layout_map).scope():
            assert reason in str(backbone.transformer_layers[1].unfused_reason())


@pytest.mark.nightly
def test_tokens_on_two_and_four_devices_are_those_of_one():
    """Fails if a device takes another's decays, biases or bounds, or the compiler adds messages."""
    reports = {
        count: fresh_process(
            *("-m", "tests.devices.jax_steps", family, str(count)),
            XLA_FLAGS=f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={count}",
            JAX_PLATFORMS="cpu",
        )
        for family, count in (("all", 2), ("griffin", 4))
    }
    for report in (*reports[2].values(), *reports[4].values()):
        assert report["unfused"] == {}
        assert all(report["same tokens"].values())
        assert report["unplanned"] == []
