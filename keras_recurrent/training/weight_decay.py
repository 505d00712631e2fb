"""Exclusion of decays, lower bounds, norms and biases from weight decay."""

import warnings

import keras

from keras_recurrent.checks.arguments import check_boolean
from keras_recurrent.dispatch import BACKEND


def exclude_from_weight_decay(optimizer, model, *, norms_and_biases=False):
    """Excludes decays, angles and lower bounds from weight decay, adding to earlier exclusions.

    Weight decay pulls these weights towards 0, which makes a layer forget sooner. They are Λ of
    `RGLRU` and `CGLRU`, θ of `CGLRU` and `LRPE`, the logits of `LowerBounds`, and weights that a
    custom layer adds by `add_state_weight(..., weight_decay=False)`. Call this function before
    `compile`, and after `optimizer.exclude_from_weight_decay`, which discards earlier exclusions.

    Frozen weights are excluded, too, in case they are trained later. `.keras` files of the language
    models and classifiers of this package keep all exclusions. For other models, call the function
    again after loading, before training.

    Args:
        optimizer: an optimizer of Keras that has not taken a step. In a `LossScaleOptimizer` or
            `MultiOptimizer`, the inner optimizers get the exclusions. None: the weights are only
            returned, for an optimizer of another library.
        model: a built model or layer.
        norms_and_biases: boolean, also excludes biases and all weights with fewer than two axes,
            such as the scales of norms.

    Returns:
        A list of the excluded `keras.Variable`s, empty if `model` has none.

    Raises:
        ValueError: `optimizer` is not an optimizer of Keras, has taken a step (compiled steps keep
            the exclusions of the first one), or is a `MultiOptimizer` with a function as its map
            that is not built; `model` is not a Keras layer or model, or is not built; or
            `norms_and_biases` is not a boolean.

    Example:

    >>> import keras, keras_recurrent
    >>> model = keras_recurrent.models.GriffinCausalLM.from_preset("hawk_tiny", num_layers=1)
    >>> optimizer = keras.optimizers.AdamW(1e-3, weight_decay=0.1)
    >>> excluded = keras_recurrent.exclude_from_weight_decay(optimizer, model)
    >>> [variable.path for variable in excluded]
    ['block_0/temporal_block/rg_lru/a_logit']
    >>> model.compile(optimizer, model.loss)

    Example: parameter groups of an optimizer of torch.

    ```
    undecayed = keras_recurrent.exclude_from_weight_decay(None, model, norms_and_biases=True)
    ids = {id(variable) for variable in undecayed}
    groups = [
        {"params": [v.value for v in model.trainable_variables if id(v) not in ids]},
        {"params": [v.value for v in undecayed if v.trainable], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
    ```
    """
    check_boolean("norms_and_biases", norms_and_biases)
    if not isinstance(model, keras.Layer):
        raise ValueError(
            f"`model` must be a Keras model or layer; got a `{type(model).__name__}`. The model is "
            "the second argument: `exclude_from_weight_decay(optimizer, model)`."
        )
    if not model.built:
        raise ValueError(
            f"`model`, a `{type(model).__name__}`, is not built and has no weights yet. Call it on "
            "data, or call its `build` with the shape of its inputs."
        )
    if not isinstance(optimizer, (keras.optimizers.Optimizer, type(None))):
        raise ValueError(
            f"`optimizer` must be an optimizer of Keras; got {optimizer!r}. For an optimizer of "
            "another library, pass None and use the list of variables that is returned."
        )
    optimizers = [] if optimizer is None else _updating_optimizers(optimizer)
    if optimizer is not None and not optimizers:
        raise ValueError(
            "`optimizer` is a `MultiOptimizer` that creates its optimizers when it is built. Call "
            "`optimizer.build(model.trainable_variables)` first."
        )
    for updating in optimizers:
        if getattr(updating, "_exclude_from_weight_decay_cache", None):
            raise ValueError(
                f"`optimizer`, a `{type(updating).__name__}`, has already taken a step. After it, "
                "exclusions have no effect. Call `exclude_from_weight_decay` before training. To "
                "continue a run, save the model, load it, and call this function on what was "
                "loaded."
            )
    variables = [v for v in model.weights if not getattr(v, "weight_decay", True)]
    if norms_and_biases:
        known = {id(v) for v in variables}
        biases = {id(getattr(layer, "bias", None)) for layer in model._flatten_layers()}
        variables += [
            v for v in model.weights if id(v) not in known and (len(v.shape) < 2 or id(v) in biases)
        ]
    for updating in optimizers:
        _exclude(updating, variables)
    return variables


def excluded_paths(optimizer, model):
    """Returns the paths of the weights that no inner optimizer decays, for `restore_exclusions`."""
    optimizers = _updating_optimizers(optimizer)
    if not optimizers:
        return []
    return [v.path for v in model.weights if all(_is_excluded(one, v) for one in optimizers)]


def restore_exclusions(optimizer, model, paths):
    """Excludes the weights of `model` with these paths from weight decay."""
    paths = set(paths)
    for updating in _updating_optimizers(optimizer):
        _exclude(updating, [v for v in model.weights if v.path in paths])


def warn_of_decayed_decays(optimizer, model):
    """Warns if the optimizer decays weights that set decays, angles or lower bounds."""
    decayed = [
        (updating, variable)
        for updating in _updating_optimizers(optimizer)
        for variable in model.trainable_variables
        if not getattr(variable, "weight_decay", True)
        and _decay_rate(updating, variable)
        and not _is_excluded(updating, variable)
    ]
    if decayed:
        updating, variable = decayed[0]
        warnings.warn(
            f"`{type(updating).__name__}` has a weight decay of {_decay_rate(updating, variable)} "
            "for weights that set decays, angles or lower bounds, such as "
            f"{variable.path!r} ({len(decayed)} in all). The model then forgets sooner. Call "
            "`keras_recurrent.exclude_from_weight_decay(optimizer, model)` before `compile`.",
            stacklevel=2,
        )


def _updating_optimizers(optimizer):
    """Returns the optimizers that update weights, which wrappers contain."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return _updating_optimizers(optimizer.inner_optimizer)
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return list(optimizer.optimizers)
    return [optimizer]


def _exclude(optimizer, variables):
    """Excludes variables in addition to earlier exclusions, which Keras's method discards."""
    earlier = getattr(optimizer, "_exclude_from_weight_decay", ())
    pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    optimizer.exclude_from_weight_decay(variables, [pattern.pattern] if pattern else None)
    optimizer._exclude_from_weight_decay.update(earlier)


def _is_excluded(optimizer, variable):
    """Returns True if the optimizer excludes the variable, in Keras's own judgment."""
    before = dict(getattr(optimizer, "_exclude_from_weight_decay_cache", {}))
    if BACKEND == "tensorflow" and not isinstance(optimizer, keras.optimizers.Muon):
        variable = variable.value  # as in a step: names of `tf.Variable`s are paths
    excluded = not optimizer._use_weight_decay(variable)
    # The results of a step alone, by which `exclude_from_weight_decay` knows of it.
    optimizer._exclude_from_weight_decay_cache = before
    return excluded


def _decay_rate(optimizer, variable):
    if isinstance(optimizer, keras.optimizers.Muon) and optimizer._should_use_adamw(variable):
        return optimizer.adam_weight_decay
    return optimizer.weight_decay
