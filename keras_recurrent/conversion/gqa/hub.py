"""KerasHub's backbones and tasks: those with a number of key and value heads, and the others."""

import keras_hub

from keras_recurrent.conversion.gqa import sites as attention
from keras_recurrent.conversion.gqa.hub_models import GROUPED_MODELS
from keras_recurrent.conversion.gqa.hub_support import CONFIGURABLE, REFUSED
from keras_recurrent.conversion.gqa.pooling import transfer

GROUPED_CLASSES = tuple(GROUPED_MODELS.values())
_SERVED = ", ".join(
    cls.__name__
    for cls in (*CONFIGURABLE, *GROUPED_MODELS)
    if issubclass(cls, keras_hub.models.Backbone)
)


def is_hub(model):
    return isinstance(model, (keras_hub.models.Backbone, keras_hub.models.Task))


def convert_hub(model, pooling, where):
    """A backbone or task like `model`, with fewer key and value heads."""
    is_task = isinstance(model, keras_hub.models.Task)
    backbone = model.backbone if is_task else model
    backbone_cls, groups = _plan(backbone, pooling.groups, where)
    cls = _task_class(model, backbone_cls) if is_task else backbone_cls
    attention.check_state(model)
    new = backbone_cls.from_config(backbone.get_config() | groups)
    if is_task:
        # The preprocessor has nothing that is converted, and its vocabulary is in no config.
        config = model.get_config() | {"backbone": new, "preprocessor": model.preprocessor}
        new = cls.from_config(config)
    transfer(model, new, pooling)
    return new


def decoder_sites(backbone):
    """The attention layers of a backbone of `GROUPED_MODELS` that keep a cache."""
    grouped = GROUPED_MODELS.get(type(backbone), type(backbone))
    sites = []
    for layer in getattr(backbone, grouped.decoder):
        held = [(grouped.self_attention, attention.CAUSAL)]
        if grouped.cross_attention:
            held.append((grouped.cross_attention, attention.CROSS))
        sites += [attention.Site(getattr(layer, name), kind, True) for name, kind in held]
    return sites


def _plan(backbone, groups, where):
    """The class of the new backbone, and what changes in its configuration."""
    cls = type(backbone)
    reason = why_not(cls)
    if reason:
        raise ValueError(
            f"A {cls.__name__} cannot be converted: {reason}. These can be: {_SERVED}."
        )
    if cls in CONFIGURABLE:
        return cls, _plan_configured(backbone, groups, where)
    sites = decoder_sites(backbone)
    chosen = attention.choose(sites, groups, where)
    changes = {}
    for name, kind in (
        ("num_key_value_heads", attention.CAUSAL),
        ("cross_num_key_value_heads", attention.CROSS),
    ):
        of_kind = [i for i, site in enumerate(sites) if site.kind == kind]
        if not of_kind:
            continue
        picked = set(of_kind) & set(chosen)
        if picked and picked != set(of_kind):
            raise ValueError(
                f"`where` chooses {len(picked)} of {len(of_kind)} {kind} attention layers. The "
                f"cache of a {cls.__name__} is one array over all of them: choose all or none."
            )
        changes[name] = groups if picked else getattr(backbone, name, backbone.num_heads)
    return GROUPED_MODELS.get(cls, cls), changes


def _plan_configured(backbone, groups, where):
    name, configured = type(backbone).__name__, CONFIGURABLE[type(backbone)]
    if where is not None:
        raise ValueError(
            f"`where` cannot choose among the layers of a {name}: its configuration has one number "
            "of key and value heads for all of them. Leave it out."
        )
    layers = configured.decoder_layers(backbone)
    if all(getattr(layer, "is_kv_shared_layer", False) for layer in layers):
        raise ValueError(
            f"This {name} cannot be converted: all its layers read the keys and values of another "
            "model. Convert that one, with which they must agree."
        )
    config = backbone.get_config()
    entries = [entry for entry in configured.heads if config[entry] is not None]
    for entry in entries:
        if config[entry] % groups:
            raise ValueError(
                f"`num_key_value_heads` must divide the {config[entry]} key and value heads of the "
                f"{name} (`{entry}` in its configuration); got {groups}."
            )
    return dict.fromkeys(entries, groups)


def _task_class(task, backbone_cls):
    cls = type(task)
    if backbone_cls is type(task.backbone):
        return cls
    if cls not in GROUPED_MODELS:
        raise ValueError(
            f"A {cls.__name__} cannot be converted: of the tasks on a "
            f"{type(task.backbone).__name__} only the one that generates can be. Convert the "
            "backbone, and build the task on it."
        )
    return GROUPED_MODELS[cls]


def why_not(cls):
    """Why backbones of this class cannot be converted; None if they can."""
    if cls in CONFIGURABLE or cls in GROUPED_MODELS or cls in GROUPED_CLASSES:
        return None
    if not cls.__module__.startswith("keras_hub."):
        return "it is a class of its own, which may do more with its heads than is known here"
    return REFUSED.get(cls.__name__, "what its attention does with its heads is not known here")
