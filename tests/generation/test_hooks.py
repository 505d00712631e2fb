"""Hooks of torch, and replaced methods of layers, which act at each generated token."""

import keras
import numpy as np
import pytest

from keras_recurrent import which_generation
from tests.generation.tokens import generate
from tests.models.tiny import tiny_causal_lm

if keras.config.backend() != "torch":
    pytest.skip("torch has hooks", allow_module_level=True)

import torch

LENGTHS, TOTAL = (4, 4), 12


def make_model(**options):
    model = tiny_causal_lm(family="griffin", num_layers=3)
    model.compile(**{"sampler": "greedy", **options})
    return model


def add_forward_hook(layer):
    return layer.register_forward_hook(lambda module, given, output: output.flip(-1)).remove


def add_forward_pre_hook(layer):
    return layer.register_forward_pre_hook(lambda module, given: (given[0].flip(-1),)).remove


def replace_method(name):
    """Returns a function that replaces a method of a layer, and returns one that restores it."""

    def replace(layer):
        before = getattr(layer, name)
        setattr(layer, name, lambda *args, **kwargs: before(*args, **kwargs).flip(-1))
        return lambda: delattr(layer, name)

    return replace


CHANGES = add_forward_hook, add_forward_pre_hook, replace_method("forward"), replace_method("call")


@pytest.mark.parametrize(
    ("sampler", "changes"), [("greedy", CHANGES), ("beam", CHANGES[:1])], ids=["greedy", "beam"]
)
def test_hook_acts_at_each_token_until_its_removal(sampler, changes):
    """A traced step ignores a hook or a replaced method, or keeps its effect."""
    model, eager = make_model(sampler=sampler), make_model(sampler=sampler, run_eagerly=True)
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


# {scope: (a function that registers a hook, reason that the step is not traced)}
HOOKS = {
    "layer": (
        lambda layer, hook: layer.register_forward_hook(hook),
        "`input_gate` has a hook, or an instance attribute `call` or `forward`",
    ),
    "all modules": (
        lambda _, hook: torch.nn.modules.module.register_module_forward_hook(hook),
        "torch has a hook for all modules",
    ),
}


@pytest.mark.parametrize(("register", "reason"), HOOKS.values(), ids=HOOKS)
def test_hook_is_called_once_per_token_and_reported(register, reason):
    model, calls = make_model(), []
    generate(model, LENGTHS, TOTAL)
    layer = model.backbone.transformer_layers[0].temporal_block.unit.input_gate
    handle = register(layer, lambda module, *_: calls.append(module))
    try:
        generate(model, LENGTHS, TOTAL)
    finally:
        handle.remove()
    # One call for the prompt, and one for each step.
    assert sum(module is layer for module in calls) == 1 + TOTAL - LENGTHS[0]
    found = which_generation(model)
    assert (found.name, found.refused["traced"]) == ("eager", reason)
    generate(model, LENGTHS, TOTAL)
    assert which_generation(model).name != "eager"
