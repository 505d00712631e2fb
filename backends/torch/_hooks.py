"""Functions that users of torch have called before or after a module."""

from torch.nn.modules import module as torch_module

_FORWARD = ("_forward_hooks", "_forward_pre_hooks")
_ALL = (*_FORWARD, "_backward_hooks", "_backward_pre_hooks")
_REPLACED = ("call", "forward")  # in an instance, as accelerate does it


def has_hooks(module):
    """Whether there are some for the module, or for all."""
    return _has(module, _ALL) or torch_module._has_any_global_hook()


def hook_reason(modules):
    """Whose code runs before, after or in place of a call of one of these modules; else None."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "torch has a hook for all modules"
    for module in modules:
        if _has(module, _FORWARD) or any(name in vars(module) for name in _REPLACED):
            name = getattr(module, "name", type(module).__name__)
            return f"`{name}` has a hook, or a `call` or `forward` of its own"
    return None


def _has(module, kinds):
    found = vars(module)
    return any(found[kind] for kind in kinds)
