"""Messages that compiled programs send between devices, from the text that XLA dumps."""

import math
import re
from typing import NamedTuple

KINDS = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute|collective-broadcast"
SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f64": 8, "s64": 8, "u64": 8, "c64": 8}


class Collective(NamedTuple):
    kind: str
    shape: tuple[int, ...]
    nbytes: int
    in_loop: bool
    operation: str  # the last characters of JAX's name for its source


def collectives(text):
    """Returns a `Collective` for each array that is sent, from the text of an optimized program.

    Groups of one device, along an axis of size 1, send nothing.
    """
    computations = _computations(text)
    looped = _called_computations(computations, re.findall(r"(?:body|condition)=%?([\w.-]+)", text))
    messages = []
    for name, lines in computations.items():
        for line in lines:
            match = re.search(rf"= (.*?) ({KINDS})(?:-start)?\(", line)
            if not match or re.search(r"replica_groups=(\{\{\d+\}|\[\d+,1\])", line):
                continue
            operation = re.search(r'op_name="([^"]*)"', line)
            for dtype, sizes in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", match[1]):
                shape = tuple(map(int, sizes.split(","))) if sizes else ()
                nbytes = math.prod(shape) * SIZES.get(dtype, 4)
                where = operation[1][-80:] if operation else ""
                messages.append(Collective(match[2], shape, nbytes, name in looped, where))
    return messages


def _computations(text):
    """Returns {name of a computation: its lines}."""
    computations, lines = {}, []
    for line in text.splitlines():
        start = re.match(r"(?:ENTRY )?%?([\w.-]+) .*\{$", line)
        if start:
            lines = computations.setdefault(start[1], [])
        lines.append(line)
    return computations


def _called_computations(computations, names):
    """Returns the names of these computations and of all that they call."""
    reached, left = set(), list(names)
    while left:
        name = left.pop()
        if name not in reached and name in computations:
            reached.add(name)
            body = "\n".join(computations[name][1:])
            left += re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.-]+)", body)
            for branches in re.findall(r"branch_computations=\{([^}]*)\}", body):
                left += re.findall(r"[\w.-]+", branches)
    return reached
