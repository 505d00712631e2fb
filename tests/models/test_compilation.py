"""Training steps and networks compiled as a whole."""

import functools

import keras
import numpy as np
import pytest

from tests.models.tiny import FAMILIES, tiny_backbone, tiny_causal_lm, training_batch
from tests.processes import fresh_process

BACKEND = keras.config.backend()

# torch traces a step of Keras for a minute, and Inductor compiles its C++ for another minute.
COMPILERS = ["default"]
if BACKEND == "torch":
    COMPILERS = [pytest.param(of, marks=pytest.mark.nightly) for of in ("aot_eager", "default")]
# Each family takes torch.compile 6 to 14 seconds.
OTHERS = [pytest.param(name, marks=pytest.mark.nightly) for name in FAMILIES if name != "hgrn2"]


@pytest.mark.nightly
@pytest.mark.parametrize("compiler", COMPILERS)
def test_compiled_training_step_equals_an_eager_step(compiler, monkeypatch):
    if compiler != "default":
        import torch

        torch.compiler.reset()
        with_compiler = functools.partial(torch.compile, backend=compiler)
        monkeypatch.setattr(torch, "compile", with_compiler)
    weights = []
    for options in ({"jit_compile": True}, {"run_eagerly": True}):
        model = tiny_causal_lm(num_layers=1)
        model.compile(keras.optimizers.SGD(0.1), **options)
        model.fit(*training_batch(), batch_size=2, verbose=0)
        weights.append(model.get_weights())
    for compiled, plain in zip(*weights, strict=True):
        np.testing.assert_allclose(compiled, plain, rtol=1e-3, atol=1e-4)


WITHOUT_TENSORFLOW = """
import sys
sys.modules["tensorflow"] = sys.modules["tensorflow_text"] = None
from tests.models.test_causal_lm import TEXTS, language_model

for packed in (False, True):
    model = language_model(packed)
    model.fit(TEXTS, batch_size=6, verbose=0, validation_data=(TEXTS,))
    text = model.generate(["tick", ""], max_length=12)
    assert text[0].startswith("tick"), text
print('"done"')
"""


@pytest.mark.nightly
@pytest.mark.skipif(BACKEND == "tensorflow", reason="the test removes TensorFlow")
def test_training_and_generation_on_strings_need_no_tensorflow():
    assert fresh_process("-c", WITHOUT_TENSORFLOW) == "done"


@pytest.mark.skipif(BACKEND != "torch", reason="JAX and TensorFlow compile a step as one program")
@pytest.mark.parametrize("family", ["hgrn2", *OTHERS])
def test_torch_compiles_a_network_as_one_graph(family):
    """torch.compile cannot trace code that all networks share, such as a ContextVar."""
    import torch

    backbone = tiny_backbone(family=family, num_layers=3 if family == "griffin" else 1)
    tokens = torch.ones((2, 9), dtype=torch.int32)
    inputs = dict.fromkeys(("token_ids", "padding_mask", "segment_ids"), tokens)
    expected = backbone(inputs)
    torch.compiler.reset()
    compiled = torch.compile(lambda inputs: backbone(inputs), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(inputs), expected)
