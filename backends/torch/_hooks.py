"""Hooks of torch modules, which run before or after a call."""

from torch.nn.modules import module as torch_module

_ALL = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
_REPLACED = {"call", "forward"}  # on an instance, as accelerate does


def has_hooks(module):
    """Returns True if the module has a hook, or torch has one for all modules."""
    found = vars(module)
    for kind in _ALL:
        if found[kind]:
            return True
    return torch_module._has_any_global_hook()


def hook_reason(modules):
    """Reason other code runs before, after or in place of a call of these modules, or None."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "torch has a hook for all modules"
    for module in modules:
        found = vars(module)
        has_hook = found["_forward_hooks"] or found["_forward_pre_hooks"]
        if has_hook or not _REPLACED.isdisjoint(found):
            name = getattr(module, "name", type(module).__name__)
            return f"`{name}` has a hook, or an instance attribute `call` or `forward`"
    return None
