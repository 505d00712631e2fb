"""Caches of one sequence, stacked to few tensors: the host needs time for each operation.

A row is a list of tensors [n, ...], one for each group of n tensors of a cache with equal shapes
and dtypes.
"""

import functools

import torch

from keras_recurrent.checks.shapes import group_equal


class Row(list):
    """A list of tensors.

    Attributes:
        position: the index in `Rows` of the row that the tensors may be views of. None: they have
            their own memory.
    """

    position: int | None = None

    def materialize(self):
        """Replaces views by copies."""
        if self.position is not None:
            self[:], self.position = [t.clone() for t in self], None


class Rows:
    """The rows of tensors [B, ...].

    Args:
        tensors: a list of tensors.
        stacks: a list of `(indices, stacked tensor)`; the tensors at `indices` are its views.

    Attributes:
        groups: the indices of the tensors in each group.
    """

    def __init__(self, tensors, stacks=()):
        by_indices = {tuple(indices): stack for indices, stack in stacks}
        self.groups = group_equal(tensors)
        # For each group a stacked tensor [n, B, ...], or a list of n tensors.
        self._parts = [
            by_indices.get(tuple(group), [tensors[i] for i in group]) for group in self.groups
        ]

    def view(self, index):
        """Returns a `Row` whose tensors may be views of a row."""
        row = Row(
            torch.stack([t[index] for t in part]) if isinstance(part, list) else part[:, index]
            for part in self._parts
        )
        row.position = index
        return row

    def copy(self, index):
        """Returns a copy of a row, a `Row`."""
        row = self.view(index)
        row.materialize()
        return row

    def set(self, index, row):
        """Overwrites a row."""
        for part, values in zip(self._parts, row, strict=True):
            if isinstance(part, list):
                torch._foreach_copy_([t[index] for t in part], list(values))
            else:
                part[:, index].copy_(values)

    def tensors(self, row):
        """Returns the tensors [1, ...] of a `Row`, views in the order of the given tensors."""
        found: dict = {}
        for group, values in zip(self.groups, row, strict=True):
            found.update(zip(group, values[:, None].unbind(), strict=True))
        return [found[index] for index in sorted(found)]


class Extension:
    """Function that extends a `Row` of some tensors to a `Row` of all, by initial values.

    Args:
        rows: the `Rows` of all tensors.
        initial: a `Row` of `rows` with the values of the other tensors.
        part: the `Rows` of some tensors.
        indices: a list of the indices of these tensors among all.
    """

    def __init__(self, rows, initial, part, indices):
        places = {
            indices[index]: (number, position)
            for number, group in enumerate(part.groups)
            for position, index in enumerate(group)
        }
        self._places = [[places.get(index) for index in group] for group in rows.groups]
        self._whole = [[(n, k) for k in range(len(group))] for n, group in enumerate(part.groups)]
        self._initial = initial

    def __call__(self, row):
        return Row(map(functools.partial(self._group, row), self._places, self._initial))

    def _group(self, row, places, initial):
        if places in self._whole:
            return row[places[0][0]]
        given = [(k, *place) for k, place in enumerate(places) if place is not None]
        values = initial.clone() if given else initial
        for k, number, position in given:
            values[k].copy_(row[number][position])
        return values
