"""JSON documents that a dictionary cannot represent, and random changes of them."""

import json

_encode = json.JSONEncoder().encode


class Raw(str):
    """Text that is inserted into the document without quotes."""


class Pairs(list):
    """An object as a list of `[key, value]`, in which a key may occur twice."""


def parse(text):
    return json.loads(text, object_pairs_hook=lambda pairs: Pairs(map(list, pairs)))


def to_text(value):
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{_encode(k)}:{to_text(v)}" for k, v in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(to_text, value)) + "]"
    return _encode(value)


HOSTILE = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**53, 2**63, 2**64 - 1, -(2**63), 10**7),
    *(10**400, 0.0, -0.0, 0.5, 1.5, 1e-320, 1e-30, 1e300),
    *(float("inf"), float("-inf"), float("nan")),
    *("", "x", "F64", "BF16", "F16", "I8", "U8", "BOOL", "attention", "recurrent"),
    *("../config.json", "/etc/passwd", ".", "model.safetensors", "NaN", "1", "\x00", "\ud800"),
    *("a" * 10_000, [], [[]], [1], [0], ["x"], [None], [1, 2, 3, 4]),
    *([2**62, 2**62], [0, 2**63], list(range(999))),
    *(Pairs(), Pairs([["x", 1]]), Pairs([["dtype", "F32"], ["shape", [0]]])),
    *(Raw("[" * 200 + "]" * 200), Raw("[" * 3000 + "]" * 3000)),
    *(Raw('{"a":' * 900 + "1" + "}" * 900), Raw("1" + "0" * 5000), Raw("1e999")),
    *(Raw("-"), Raw("nul"), Raw('"'), Raw(","), Raw("{")),
)
HOSTILE_KEYS = ("", "x", "__metadata__", "dtype", "model_type", "\x00", "a" * 5000)
HOSTILE_KEYS += ("registered_name",)


def change(document, rng):
    """Returns a copy of the document with a few random changes."""
    document = _copy(document)
    for _ in range(1 + int(rng.integers(3)) * int(rng.integers(2))):
        positions = list(_positions(document))
        if not positions:
            break
        _change_one(positions, rng)
    return document


def _copy(value):
    return type(value)(map(_copy, value)) if isinstance(value, list) else value


def _get(node, index):
    return node[index][1] if isinstance(node, Pairs) else node[index]


def _set(node, index, value):
    if isinstance(node, Pairs):
        node[index][1] = value
    else:
        node[index] = value


def _positions(node):
    """`(container, index)` of every value in a document."""
    for index in range(len(node)):
        yield node, index
        if isinstance(_get(node, index), list):
            yield from _positions(_get(node, index))


def _change_one(positions, rng):
    node, index = positions[rng.integers(len(positions))]
    value = _get(node, index)
    another = _get(*positions[rng.integers(len(positions))])
    is_object = isinstance(node, Pairs)
    kind = rng.integers(10)
    if kind == 0:
        del node[index]
    elif kind <= 3:
        _set(node, index, _copy(HOSTILE[rng.integers(len(HOSTILE))]))
    elif kind == 4 and isinstance(value, (int, float)):
        numbers = (value + 1, value - 1, -value, value * 2, value // 2, str(value))
        _set(node, index, numbers[rng.integers(6)])
    elif kind == 5:
        _set(node, index, [value])
    elif kind == 6:
        _set(node, index, _copy(another))
    elif kind == 7 and is_object:
        node[index][0] = HOSTILE_KEYS[rng.integers(len(HOSTILE_KEYS))]
    elif kind == 8 and is_object:
        node.insert(int(rng.integers(len(node) + 1)), [node[index][0], _copy(another)])
    elif is_object:
        rng.shuffle(node)  # The order of keys has no meaning.
