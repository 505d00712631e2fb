"""JSON that a dictionary cannot hold, such as a key twice, and random changes of it."""

import json

_to_text = json.JSONEncoder().encode


class Raw(str):
    """A piece of text that stands in the document as it is."""


class Pairs(list):
    """An object as a list of `[key, value]`, in which a key may be twice."""


def parse(text):
    return json.loads(text, object_pairs_hook=lambda pairs: Pairs(map(list, pairs)))


def text_of(value):
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{_to_text(k)}:{text_of(v)}" for k, v in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(text_of, value)) + "]"
    return _to_text(value)


HOSTILE = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**53, 2**63, 2**64 - 1, -(2**63), 10**7),
    *(
        10**400,
        0.0,
        -0.0,
        0.5,
        1.5,
        1e-320,
        1e-30,
        1e300,
        float("inf"),
        float("-inf"),
        float("nan"),
    ),
    *(
        "",
        "x",
        "F64",
        "BF16",
        "F16",
        "I8",
        "U8",
        "BOOL",
        "attention",
        "recurrent",
        "../config.json",
    ),
    *("/etc/passwd", ".", "model.safetensors", "NaN", "1", "\x00", "\ud800", "a" * 10_000),
    *(
        [],
        [[]],
        [1],
        [0],
        ["x"],
        [None],
        [1, 2, 3, 4],
        [2**62, 2**62],
        [0, 2**63],
        list(range(999)),
    ),
    *(Pairs(), Pairs([["x", 1]]), Pairs([["dtype", "F32"], ["shape", [0]]])),
    *(
        Raw("[" * 200 + "]" * 200),
        Raw("[" * 3000 + "]" * 3000),
        Raw('{"a":' * 900 + "1" + "}" * 900),
    ),
    *(Raw("1" + "0" * 5000), Raw("1e999"), Raw("-"), Raw("nul"), Raw('"'), Raw(","), Raw("{")),
)


def change(document, rng):
    """The document with a few random changes somewhere in it."""
    document = _copied(document)
    for _ in range(1 + int(rng.integers(3)) * int(rng.integers(2))):
        places = list(_places(document))
        if not places:
            break
        _change_one(document, places, rng)
    return document


def _copied(value):
    if isinstance(value, list):
        return type(value)(map(_copied, value))
    return value


def _places(node):
    """`(container, index, whether it is an object)` of every value in a document."""
    for index, item in enumerate(node):
        value = item[1] if isinstance(node, Pairs) else item
        yield node, index
        if isinstance(value, list):
            yield from _places(value)


def _change_one(document, places, rng):
    node, index = places[rng.integers(len(places))]
    is_object = isinstance(node, Pairs)
    value = node[index][1] if is_object else node[index]
    other, at = places[rng.integers(len(places))]
    another = other[at][1] if isinstance(other, Pairs) else other[at]

    def put(new):
        if is_object:
            node[index][1] = new
        else:
            node[index] = new

    kind = rng.integers(10)
    if kind == 0:
        del node[index]
    elif kind <= 3:
        put(_copied(HOSTILE[rng.integers(len(HOSTILE))]))
    elif kind == 4 and isinstance(value, (int, float)):
        put((value + 1, value - 1, -value, value * 2, value // 2, str(value))[rng.integers(6)])
    elif kind == 5:
        put([value])
    elif kind == 6:
        put(_copied(another))
    elif kind == 7 and is_object:
        node[index][0] = HOSTILE_KEYS[rng.integers(len(HOSTILE_KEYS))]
    elif kind == 8 and is_object:
        node.insert(int(rng.integers(len(node) + 1)), [node[index][0], _copied(another)])
    elif is_object:
        rng.shuffle(node)  # nothing changes, in an object


HOSTILE_KEYS = (
    "",
    "x",
    "__metadata__",
    "dtype",
    "model_type",
    "\x00",
    "a" * 5000,
    "registered_name",
)
