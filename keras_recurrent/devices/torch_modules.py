"""Keras models as torch modules, whose parameters `torch.distributed` can average and shard."""

from collections import Counter
from typing import Any

import keras
import numpy as np
import torch
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate


class TorchModule(torch.nn.Module):
    """Keras model as a torch module for training on several devices. Keras must run on torch.

    Each layer has a module, which is called in place of the layer and has the layer's weights as
    parameters, such as `block_0.mlp.gate_proj.kernel`. Layers then read their weights from these
    modules, so they compute with the parameters that torch replaces, such as shards. Make one
    module of a built model, after `enable_lora`, and call it in place of the model.

    - `DistributedDataParallel` takes the module; its method `fully_shard` applies FSDP2.
      `keras.RematScope`, every dtype policy and `torch.nn.utils.clip_grad_norm_` work with both.
    - `torch.distributed.checkpoint` saves shards, which load into a `TorchModule` of an unsharded
      model, also in one process.
    - Weights are trained by an optimizer of torch, in a custom loop. Read the weights of a sharded
      model by `module.state_dict()`, not by Keras.

    Args:
        model: a built Keras model, of this package or functional.

    Call arguments:
        *args, **kwargs: arguments of the model.
        labels: integers `[B, T]`, the next tokens, for a language model of this package whose
            `compile` has its default loss. The module then returns the loss, computed from hidden
            states without the logits of all tokens. Not supported with tensor parallelism. The loss
            is NaN if a label with a weight other than 0 is outside the vocabulary.
        sample_weight: `[B, T]`, with `labels`: the weight of each token, 0 for padding, whose label
            may be any number, such as -100. None: equal weights.

    Returns:
        The outputs of the model; with `labels`, a scalar, the mean over the tokens of this process.

    Attributes:
        model: the Keras model.
        blocks: a list of the modules of a network's residual blocks, in order. Empty for a model
            without such blocks.

    Raises:
        ValueError: `model` is not a Keras model, is not built, has such a module already, or has
            layers with equal names; in a call, `labels` for a model that computes its loss from
            logits, `sample_weight` without `labels`, or a shape other than that of the tokens.

    Example, for each process that `torchrun` starts, with a loss of each process's sequences:

    ```
    torch.distributed.init_process_group()
    module = TorchModule(model).fully_shard()
    undecayed = module.find_parameters(exclude_from_weight_decay(None, model))
    ids = {id(parameter) for parameter in undecayed}
    groups = [
        {"params": [p for p in module.parameters() if id(p) not in ids]},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
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
                    f"`model` has two layers {layer.name!r}, or torch's modules have another "
                    "attribute with that name. Give each layer a unique name."
                )
            self.add_module(layer.name, LayerModule(layer, modules))
        network = getattr(model, "backbone", model)
        blocks = getattr(network, "transformer_layers", ())
        self._blocks = [modules[id(layer)] for layer in blocks]
        tops = (modules[id(layer)] for layer in layers)
        self._shard_scope = _ShardScope([v for module in tops for v in module.variables])
        for module in modules.values():
            module.route_calls(self._shard_scope)

    @property
    def blocks(self):
        """Modules of the residual blocks, in order."""
        return list(self._blocks)

    def find_parameters(self, variables):
        """Returns the parameters of Keras variables, which are shards after `fully_shard`."""
        ids = {id(variable) for variable in variables}
        parameters = {
            id(variable): getattr(module, name)
            for variable, module, name in self._shard_scope.variables
            if id(variable) in ids
        }
        return list(parameters.values())

    def fully_shard(self, mesh=None, **options):
        """Shards weights, gradients and slots over processes by FSDP2, each block as a group.

        FSDP needs one dtype in a group, but under the policy `bfloat16` decays, lower bounds and
        convolutions keep float32 weights. Every weight whose dtype is not the most common one,
        counted in elements, is kept whole in each process, as a replicated `DTensor`, and its
        gradients are averaged at the end of a backward pass.

        Call it once, before the optimizer is made.

        Args:
            mesh: the `DeviceMesh` of the processes. None: all processes.
            **options: further arguments of `torch.distributed.fsdp.fully_shard` for all groups,
                such as `mp_policy` and `reshard_after_forward`.

        Returns:
            The module.

        Raises:
            ValueError: a weight is a `DTensor`, such as one of tensor parallelism, and weights have
                several dtypes.
        """
        parameters = list(self.parameters())
        if mesh is None:
            kind = parameters[0].device.type
            mesh = init_device_mesh(kind, (torch.distributed.get_world_size(),))
        sizes: Counter = Counter()
        for parameter in parameters:
            sizes[parameter.dtype] += parameter.numel()
        ((dtype, _),) = sizes.most_common(1)
        if len(sizes) > 1 and any(isinstance(p, DTensor) for p in parameters):
            raise ValueError(
                "`fully_shard` does not combine weights that are `DTensor`s already with weights "
                f"of several dtypes, {', '.join(map(str, sizes))}. Use the dtype policy "
                '"float32" or "mixed_bfloat16", whose weights are all float32.'
            )
        replicas: dict = {}
        for _, module, name in self._shard_scope.variables:
            parameter = module._parameters.get(name)
            if parameter is not None and parameter.dtype is not dtype:
                if parameter not in replicas:
                    replicas[parameter] = _replicate(parameter, mesh)
                module._replicate(name, replicas[parameter])
        _GradientAverage(list(replicas.values()))
        for module in (*self._blocks, self):
            fsdp.fully_shard(module, mesh=mesh, ignored_params={*replicas.values()}, **options)
        with self._shard_scope:
            pass  # binds variables to shards, which frees the whole weights
        return self

    def __call__(self, *args, **kwargs):
        with self._shard_scope:
            try:
                return super().__call__(*args, **kwargs)
            except AssertionError as error:
                if "uniform original parameter dtype" in str(error):
                    error.add_note("Call `module.fully_shard()`, which shards several dtypes.")
                raise

    def forward(self, *args, labels=None, sample_weight=None, **kwargs):
        if labels is None:
            if sample_weight is not None:
                raise ValueError("`sample_weight` weighs `labels`, which are None: pass both.")
            return self.model(*args, **kwargs)
        if reason := self._logits_reason():
            raise ValueError(
                f"`labels` request a loss without logits, but this model needs logits: {reason}. "
                "Leave them out, and use `model.loss(labels, module(...), sample_weight)`."
            )
        hidden_states = self.model.backbone(*args, **kwargs)
        if isinstance(hidden_states, DTensor):
            raise ValueError(
                "`labels` are not supported with tensor parallelism, which does not split the "
                "vocabulary. Leave them out, and use `model.loss(labels, module(...), "
                "sample_weight)`."
            )
        rows = tuple(hidden_states.shape[:2])
        for name, given in (("labels", labels), ("sample_weight", sample_weight)):
            shape = rows if given is None else tuple(np.shape(given))
            if shape != rows:
                raise ValueError(
                    f"`{name}` must have the shape of the tokens, {rows}; got {shape}."
                )
        return self.model.loss_of_hidden_states(hidden_states, labels, sample_weight)[0]

    def _logits_reason(self):
        if not hasattr(self.model, "logits_reason"):
            return f"`{type(self.model).__name__}` is not a language model of keras_recurrent"
        return self.model.logits_reason()


class LayerModule(torch.nn.Module):
    """Module of one layer in a `TorchModule`, with its weights and the modules of its sublayers.

    Args:
        layer: a built Keras layer.
        modules: `{id of a layer: module}`, to which this module and those of sublayers are added.
    """

    def __init__(self, layer, modules):
        super().__init__()
        if isinstance(layer.call, LayerModule):
            raise ValueError(
                f"`model` has a `TorchModule` already, which contains its layer {layer.name!r}. "
                "Use that module."
            )
        modules[id(layer)] = self
        object.__setattr__(self, "layer", layer)
        self.variables: list = []  # (variable, module, name) of all layers below
        self._replicated: set = set()  # names of weights that FSDP leaves whole
        seen = set()
        for sublayer in layer._layers:
            seen.update(id(v) for v in sublayer.variables)
            module = modules.get(id(sublayer)) or LayerModule(sublayer, modules)
            self.add_module(sublayer.name, module)
            self.variables += module.variables
        for variable in layer.variables:
            if id(variable) not in seen:
                self._add(variable)
        self._call = layer.call
        self._shard_scope: Any = None

    def _add(self, variable):
        name = variable.name
        if hasattr(self, name):
            name = variable.path.replace(".", "_").replace("/", "_")
        if variable.value.is_floating_point():
            self.register_parameter(name, variable.value)
        else:  # a seed
            self.register_buffer(name, variable.value)
        self.variables.append((variable, self, name))

    def route_calls(self, shard_scope):
        """Makes calls of the layer call this module."""
        self._shard_scope = shard_scope
        object.__setattr__(self.layer, "call", self)

    def __call__(self, *args, **kwargs):
        with self._shard_scope:
            return super().__call__(*args, **kwargs)

    def _replicate(self, name, parameter):
        """Registers a replicated `DTensor` as a weight, of which calls read the local tensor."""
        self.register_parameter(name, parameter)
        self._replicated.add(name)

    def _local(self, name):
        """Returns the tensor that a call computes with."""
        value = getattr(self, name)
        return value.to_local() if name in self._replicated else value

    def forward(self, *args, **kwargs):
        for variable, module, name in self.variables:
            _bind(variable, module._local(name))
        return self._call(*args, **kwargs)


class _ShardScope:
    """Context manager of a call. After the outermost one, variables are bound to shards again.

    `fully_shard` frees the weights that it gathers for a call, without notice.
    """

    def __init__(self, variables):
        self.variables, self._depth, self._shards = variables, 0, {}

    def __enter__(self):
        if self._depth == 0:
            for variable, module, name in self.variables:
                if isinstance(value := getattr(module, name), DTensor):
                    self._shards[id(variable)] = value
        self._depth += 1

    def __exit__(self, *error):
        self._depth -= 1
        if self._depth == 0:
            for variable, module, name in self.variables:
                _bind(variable, self._shards.get(id(variable), getattr(module, name)))


class _GradientAverage:
    """Averages the gradients of replicated weights over processes after each backward pass."""

    def __init__(self, parameters):
        self._parameters, self._pending = parameters, set()
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._schedule)

    def _schedule(self, parameter):
        self._pending.add(parameter)
        torch.autograd.Variable._execution_engine.queue_callback(self._average)

    @torch.no_grad()
    def _average(self):
        # A mean added to another process's gradients and averaged again stays the mean, so
        # gradients accumulate over several passes.
        pending = [p for p in self._parameters if p in self._pending]
        self._pending.clear()
        if not pending:  # a callback for each gradient, of which the first one averages all
            return
        mesh = pending[0].device_mesh
        local = [p.grad.to_local() for p in pending]
        total = torch.cat([gradient.flatten() for gradient in local])
        for dimension in range(mesh.ndim):
            torch.distributed.all_reduce(total, group=mesh.get_group(dimension))
        means = (total / mesh.size()).split([gradient.numel() for gradient in local])
        for gradient, mean in zip(local, means, strict=True):
            gradient.copy_(mean.view_as(gradient))


def _replicate(parameter, mesh):
    whole = DTensor.from_local(parameter.detach(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return torch.nn.Parameter(whole, parameter.requires_grad)


def _bind(variable, value):
    if variable._value is not value:
        variable._value = value


def _top_layers(model):
    """Yields the layers that a model calls, with nested models replaced by their layers."""
    for layer in model._layers:
        if isinstance(layer, keras.Model):
            yield from _top_layers(layer)
        elif not isinstance(layer, keras.layers.InputLayer):
            yield layer
