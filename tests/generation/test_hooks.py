"""On torch: what users have called around layers is called at each token."""

import keras
import numpy as np
import pytest

from keras_recurrent import which_generation
from tests.generation.test_programs import generate
from tests.models.tiny import tiny_causal_lm

if keras.config.backend() != "torch":
    pytest.skip("torch has hooks", allow_module_level=True)

import torch

LENGTHS, TOTAL = (4, 4), 12


def compiled(**kwargs):
    model = tiny_causal_lm(family="griffin", num_layers=3)
    model.compile(**{"sampler": "greedy", **kwargs})
    return model


def other_output(module, arguments, output):
    return output.flip(-1)


def by_hook(layer):
    return layer.register_forward_hook(other_output).remove


def by_hook_before(layer):
    return layer.register_forward_pre_hook(lambda module, given: (given[0].flip(-1),)).remove


def replaced(name):
    def replace(layer):
        before = getattr(layer, name)
        setattr(layer, name, lambda *args, **kwargs: before(*args, **kwargs).flip(-1))
        return lambda: delattr(layer, name)

    return replace


CHANGES = (by_hook, by_hook_before, replaced("forward"), replaced("call"))


@pytest.mark.parametrize(
    ("sampler", "changes"), [("greedy", CHANGES), ("beam", [by_hook])], ids=["greedy", "beam"]
)
def test_they_act_at_each_token_as_long_as_they_are_there(sampler, changes):
    model, eager = compiled(sampler=sampler), compiled(sampler=sampler, run_eagerly=True)
    plain = generate(model, LENGTHS, TOTAL)["token_ids"]
    layers = [m.backbone.transformer_layers[1].mlp.down_proj for m in (model, eager)]
    for change in changes:
        undo = [change(layer) for layer in layers]
        found, expected = (generate(m, LENGTHS, TOTAL)["token_ids"] for m in (model, eager))
        np.testing.assert_array_equal(found, expected)
        assert not np.array_equal(found, plain)
        for each in undo:
            each()
        np.testing.assert_array_equal(generate(model, LENGTHS, TOTAL)["token_ids"], plain)


def test_hooks_count_tokens_and_it_can_be_asked_why():
    model, calls = compiled(), []
    generate(model, LENGTHS, TOTAL)
    layer = model.backbone.transformer_layers[0].temporal_block.unit.input_gate
    handle = layer.register_forward_hook(lambda *_: calls.append(1))
    generate(model, LENGTHS, TOTAL)
    assert len(calls) == 1 + TOTAL - LENGTHS[0]  # the prompt but for its last token, each token
    found = which_generation(model)
    assert found.name == "eager"
    assert (
        found.refused["traced"]
        == f"`{layer.name}` has a hook, or an instance attribute `call` or `forward`"
    )
    handle.remove()
    generate(model, LENGTHS, TOTAL)
    assert which_generation(model).name != "eager"


def test_hooks_for_all_modules():
    model, calls = compiled(), set()
    register = torch.nn.modules.module.register_module_forward_hook
    handle = register(lambda module, *_: calls.add(module))
    try:
        generate(model, LENGTHS, TOTAL)
    finally:
        handle.remove()
    assert which_generation(model).refused["traced"] == "torch has a hook for all modules"
    assert model.backbone.transformer_layers[2].mlp.down_proj in calls
