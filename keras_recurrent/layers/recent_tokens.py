"""Conversion of caches with recent tokens, which are not yet in the states, to ordinary caches."""

from keras import ops

from keras_recurrent.portable.hgrn2_delayed_step import current_memory

# Maximum number of rows, of all layers, that are computed at once. More rows need more temporary
# memory; fewer rows need more launches, for which an engine would wait.
_MAX_ROWS = 64


def apply_recent_tokens(cache, concatenate=ops.concatenate):
    """Returns a cache for the backbone: recent tokens, if there are any, are applied to states.

    concatenate: the function of the backend; that of Keras converts each tensor.
    """
    groups: dict = {}
    _collect(cache, groups)
    memories: dict = {}
    for states in groups.values():
        batch_size = len(states[0]["count"])
        size = max(1, _MAX_ROWS // batch_size)
        for start in range(0, len(states), size):
            group = states[start : start + size]
            joined = {n: concatenate([state[n] for state in group]) for n in group[0]}
            found = current_memory(**joined)
            parts = ops.split(found, len(group))
            memories |= {id(state): part for state, part in zip(group, parts, strict=True)}
    return _replace(cache, memories)


def _collect(part, groups):
    """Adds the states with recent tokens to the list of their shape, the layers of one launch."""
    if isinstance(part, dict) and "recent" in part:
        groups.setdefault(part["memory"].shape, []).append(part)
    elif isinstance(part, (dict, tuple)):
        for inner in part.values() if isinstance(part, dict) else part:
            _collect(inner, groups)


def _replace(part, memories):
    if id(part) in memories:
        return {"memory": memories[id(part)]}
    if isinstance(part, dict):
        return {name: _replace(inner, memories) for name, inner in part.items()}
    return tuple(_replace(p, memories) for p in part) if isinstance(part, tuple) else part
