"""Keras models as modules of torch, whose parameters `torch.distributed` can average and shard."""

from typing import Any

import keras
import numpy as np
import torch
from torch.distributed.tensor import DTensor

from keras_recurrent.training.loss_without_logits import LossWithoutLogits


class TorchModule(torch.nn.Module):
    """A Keras model as torch's tools for several devices expect it. On the Keras backend torch.

    A module for each layer, called where the layer is, with the model's own weights for
    parameters: `block_0.mlp.gate_proj.kernel`. From then on the layers read their weights from
    these modules, so that what torch makes of the parameters, such as shards, is what computes.
    Make one of a model that is built, once, behind `enable_lora`, and call it in place of the
    model.

    `DistributedDataParallel` takes it as it is. `fully_shard` (FSDP2) takes a block, and then the
    whole; a `keras.RematScope` goes with both. So does a policy
    `mixed_bfloat16` of Keras, and `torch.nn.utils.clip_grad_norm_`. Beside that policy,
    `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32,
    cast_forward_inputs=False)` gathers half as many bytes, and rounds the weights, too, that the
    policy keeps in float32, such as those of decays.
    `torch.distributed.checkpoint` saves shards, which load into a `TorchModule` of an ordinary
    model, also in one process. Weights are then trained by an optimizer of torch, in a loop of
    your own; those of a sharded model are read by `module.state_dict()`, not by Keras.

    Args:
        model: a Keras model that is built: of this package, or functional.

    Call arguments:
        *args, **kwargs: those of the model.
        labels: integers `[B, T]`, of a language model of this package whose `compile` has its
            default loss: the token after each one. The module then returns the loss, which is made
            of hidden states, without the logits of all tokens. Not beside tensor parallelism. The
            loss is NaN where the vocabulary lacks a label whose weight is not 0.
        sample_weight: `[B, T]`, beside `labels`: how much each token counts, 0 for padding, where
            any label may stand, such as -100; None: all alike.

    Returns:
        What the model returns; with `labels`, a scalar, the mean over the tokens of this process.

    Attributes:
        model: the Keras model.
        blocks: a list of the modules of a network's residual blocks, in order; empty where it has
            none.

    Raises:
        ValueError: no model, one that is not built, one that has such a module already, or one
            whose layers share a name; at a call, `labels` for a model that makes its loss of
            logits, a `sample_weight` without `labels`, or another shape than the tokens have.

    Example, for each process that `torchrun` starts, with a loss of each process's own rows:

    ```
    torch.distributed.init_process_group()
    module = TorchModule(model)
    for block in module.blocks:
        torch.distributed.fsdp.fully_shard(block)
    torch.distributed.fsdp.fully_shard(module)
    optimizer = torch.optim.AdamW(module.parameters())
    for x, y, sample_weight in batches:
        loss = module(x, labels=y, sample_weight=sample_weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.distributed.checkpoint.save(module.state_dict(), checkpoint_id="weights")
    ```
    """

    model: Any

    def __init__(self, model):
        super().__init__()
        if not isinstance(model, keras.Model) or not model.built:
            raise ValueError(
                f"`model` must be a Keras model that is built; got a `{type(model).__name__}`."
            )
        object.__setattr__(self, "model", model)
        modules: dict = {}
        layers = list(_top_layers(model))
        for layer in layers:
            if id(layer) in modules:
                continue
            if hasattr(self, layer.name):
                raise ValueError(
                    f"`model` has two layers {layer.name!r}, or torch's modules have that name for "
                    "something else. Give each layer a name of its own."
                )
            self.add_module(layer.name, LayerModule(layer, modules))
        network = getattr(model, "backbone", model)
        blocks = getattr(network, "transformer_layers", ())
        self._blocks = [modules[id(layer)] for layer in blocks]
        tops = (modules[id(layer)] for layer in layers)
        self._outermost = _Outermost([v for module in tops for v in module.variables])
        for module in modules.values():
            module.take_calls(self._outermost)

    @property
    def blocks(self):
        """The modules of the residual blocks, in order."""
        return list(self._blocks)

    def __call__(self, *args, **kwargs):
        with self._outermost:
            return super().__call__(*args, **kwargs)

    def forward(self, *args, labels=None, sample_weight=None, **kwargs):
        if labels is None:
            if sample_weight is not None:
                raise ValueError("`sample_weight` weighs `labels`, which are None: give both.")
            return self.model(*args, **kwargs)
        if because := self._logits_because():
            raise ValueError(
                f"`labels` ask for a loss without logits, which this model needs: {because}. "
                "Leave them out, and take `model.loss(labels, module(...), sample_weight)`."
            )
        hidden_states = self.model.backbone(*args, **kwargs)
        if isinstance(hidden_states, DTensor):
            raise ValueError(
                "`labels` do not go with tensor parallelism: there the vocabulary is not split. "
                "Leave them out, and take `model.loss(labels, module(...), sample_weight)`."
            )
        rows = tuple(hidden_states.shape[:2])
        for name, given in (("labels", labels), ("sample_weight", sample_weight)):
            shape = rows if given is None else tuple(np.shape(given))
            if shape != rows:
                raise ValueError(
                    f"`{name}` must have the shape of the tokens, {rows}; got {shape}."
                )
        return self.model.loss_of_hidden_states(hidden_states, labels, sample_weight)[0]

    def _logits_because(self):
        if not isinstance(self.model, LossWithoutLogits):
            return f"`{type(self.model).__name__}` is no language model of keras_recurrent"
        return self.model.logits_because()


class LayerModule(torch.nn.Module):
    """The module of one layer inside a `TorchModule`: its own weights, and those of its sublayers.

    Args:
        layer: a Keras layer that is built.
        modules: a dict to which this one and those of sublayers are added, by the layer's id.
    """

    def __init__(self, layer, modules):
        super().__init__()
        if isinstance(layer.call, LayerModule):
            raise ValueError(
                f"`model` has a `TorchModule` already, to which its layer {layer.name!r} belongs. "
                "Use that one."
            )
        modules[id(layer)] = self
        object.__setattr__(self, "layer", layer)
        self.variables: list = []  # of all layers below, with the module and the name there
        below = set()
        for sublayer in layer._layers:
            below.update(id(v) for v in sublayer.variables)
            module = modules.get(id(sublayer)) or LayerModule(sublayer, modules)
            self.add_module(sublayer.name, module)
            self.variables += module.variables
        for variable in layer.variables:
            if id(variable) not in below:
                self._add(variable)
        self._call = layer.call
        self._outermost: Any = None

    def _add(self, variable):
        name = variable.name
        if hasattr(self, name):
            name = variable.path.replace(".", "_").replace("/", "_")
        if variable.value.is_floating_point():
            self.register_parameter(name, variable.value)
        else:  # a seed
            self.register_buffer(name, variable.value)
        self.variables.append((variable, self, name))

    def take_calls(self, outermost):
        """From now on, a call of the layer is a call of this module."""
        self._outermost = outermost
        object.__setattr__(self.layer, "call", self)

    def __call__(self, *args, **kwargs):
        with self._outermost:
            return super().__call__(*args, **kwargs)

    def forward(self, *args, **kwargs):
        for variable, module, name in self.variables:
            _bind(variable, getattr(module, name))
        return self._call(*args, **kwargs)


class _Outermost:
    """Around each call. Behind the outermost one, layers have their shards.

    What `fully_shard` gathers for a call it lets go of later, and without a word.
    """

    def __init__(self, variables):
        self._variables, self._depth, self._shards = variables, 0, {}

    def __enter__(self):
        if self._depth == 0:
            for variable, module, name in self._variables:
                if isinstance(value := getattr(module, name), DTensor):
                    self._shards[id(variable)] = value
        self._depth += 1

    def __exit__(self, *error):
        self._depth -= 1
        if self._depth == 0:
            for variable, module, name in self._variables:
                _bind(variable, self._shards.get(id(variable), getattr(module, name)))


def _bind(variable, value):
    if variable._value is not value:
        variable._value = value


def _top_layers(model):
    """The layers that a model calls, those of networks inside it by themselves."""
    for layer in model._layers:
        if isinstance(layer, keras.Model):
            yield from _top_layers(layer)
        elif not isinstance(layer, keras.layers.InputLayer):
            yield layer
