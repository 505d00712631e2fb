"""Fused decoding steps on the devices of a mesh: their communication, and their tokens."""

import keras
import numpy as np
import pytest

from keras_recurrent import dispatch
from keras_recurrent.layers import HGRN2, LightningAttention, decoding
from tests.devices.meshes import device_mesh, model_parallel
from tests.devices.processes import run_on_simulated_devices
from tests.models.tiny import HYBRID, tiny_backbone

if keras.config.backend() == "jax":
    import jax
    from jax.extend.core import jaxprs_in_params

pytestmark = pytest.mark.skipif(
    keras.config.backend() != "jax", reason="Keras splits models over devices on JAX alone"
)
# {family: further arguments of the backbone, arguments of its layout map}
CASES: dict = {
    "griffin": ({}, {"num_key_value_heads": 2}),
    "hgrn2": (HYBRID, {"num_key_value_heads": 2}),
    "lightning_hybrid": ({}, {"attention_layers": (1,), "num_key_value_heads": 2}),
    "lfm2": ({}, {"num_key_value_heads": 2}),
}


@pytest.fixture
def mesh(monkeypatch):
    """A mesh of two devices that traces programs without them; decoding uses fused steps."""
    monkeypatch.setattr(dispatch, "uses_triton_kernels", lambda tensor: True)
    axis_types = (jax.sharding.AxisType.Auto,) * 2  # as in Keras's meshes
    abstract = jax.sharding.AbstractMesh((1, 2), ("batch", "model"), axis_types=axis_types)
    monkeypatch.setattr(keras.distribution.DeviceMesh, "backend_mesh", abstract)
    return device_mesh(1, 2)


def traced_messages(jaxpr):
    """The collectives of a traced program, as pairs of a kind and a shape."""
    messages = []
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("psum", "all_gather", "all_to_all", "ppermute"):
            messages += [(equation.primitive.name, x.aval.shape) for x in equation.invars]
        for inner in jaxprs_in_params(equation.params):
            messages += traced_messages(inner)
    return messages


@pytest.mark.parametrize("family", CASES)
def test_fused_block_sends_two_sums_per_token(family, mesh):
    """A step gathers weights or states, or its norm over all heads needs another sum."""
    sizes, layout = CASES[family]
    backbone = tiny_backbone(family=family, **sizes)
    blocks, width = backbone.transformer_layers, backbone.hidden_dim
    x = np.ones((3, 1, width), "float32")

    def step(block, x, state, arguments):
        with decoding.decoding_scope():
            return block(x, initial_state=state, return_state=True, **arguments)

    with model_parallel(type(backbone).get_layout_map(mesh, **layout)):
        for block, arguments in zip(blocks, backbone.block_arguments(x), strict=True):
            state = block.get_initial_state(3, max_length=8)
            traced = jax.make_jaxpr(step, static_argnums=0)(block, x, state, arguments)
            # The squares of a norm over all heads are added up together with the outputs.
            has_norm = isinstance(block.temporal_block, (HGRN2, LightningAttention))
            expected = [("psum", (3, width + has_norm)), ("psum", (3, width))]
            assert traced_messages(traced.jaxpr) == expected, block.name


def test_embedding_sends_one_sum_per_token(mesh):
    """XLA decides how to split the table: it gathers all of it for a single token."""
    backbone = tiny_backbone(vocabulary_size=260)

    def embed(token_ids):
        with decoding.decoding_scope():
            return backbone.token_embedding(token_ids)

    with model_parallel(backbone.get_layout_map(mesh)):
        traced = jax.make_jaxpr(embed)(np.ones((1, 1), "int32"))
    assert traced_messages(traced.jaxpr) == [("psum", (1, 1, backbone.hidden_dim))]


def test_top_logits_under_data_parallelism_are_the_largest():
    """`top_k` and `logprobs` raise an error if no mesh axis splits the vocabulary."""
    x = keras.ops.arange(6.0)[None]
    with keras.distribution.DataParallel(devices=["cpu:0"]).scope():
        values, ids, _ = dispatch.run("top_logits", {"x": x, "count": 2})
    assert (values.tolist(), ids.tolist()) == ([[5, 4]], [[5, 4]])


def test_unfused_reason_names_what_devices_cannot_share(mesh):
    """A step computes queries with the keys of other heads, or gathers FSDP's weights."""
    backbone = tiny_backbone()
    foreign = keras.distribution.LayoutMap(mesh)
    foreign["block_1/mlp/down_proj/kernel"] = ("model", None)
    swapped = {"data_parallel_dim_name": "model", "model_parallel_dim_name": "batch"}
    fsdp = backbone.get_layout_map(device_mesh(2, 2), num_key_value_heads=2)
    layouts = {
        "2 heads of keys and values, which are not split": backbone.get_layout_map(mesh),
        "must be from `get_layout_map`": foreign,
        "with 'batch' as `data_parallel_dim_name`": backbone.get_layout_map(mesh, **swapped),
        "['batch', 'model']": fsdp,
    }
    for reason, layout_map in layouts.items():
        with model_parallel(layout_map):
            assert reason in str(backbone.transformer_layers[1].unfused_reason())


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "count"), [("all", 2), ("griffin", 4)])
def test_fused_steps_on_several_devices_generate_the_tokens_of_one(family, count):
    """A device uses the decays, biases or bounds of another, or the compiler adds messages."""
    run_on_simulated_devices(count, "jax_steps", family, count)
