"""Functions that users of torch have called before or after a module."""

from torch.nn.modules import module as torch_module

_KINDS = ("forward", "forward_pre", "backward", "backward_pre")


def has_hooks(module):
    """Whether there are some for the module, or for all."""
    found = vars(module)
    return any(found[f"_{kind}_hooks"] for kind in _KINDS) or torch_module._has_any_global_hook()
