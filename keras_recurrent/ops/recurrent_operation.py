"""What the operations over time share: states, token kinds and direction."""

import keras
from keras import ops

from keras_recurrent.checks.dtypes import dtype_of_sums
from keras_recurrent.devices import split_time
from keras_recurrent.ops.operation import Operation, shape_of
from keras_recurrent.ops.token_kind import token_kind


class RecurrentOperation(Operation):
    """An operation over time, which returns `(output, final_state)`.

    `B` is batch and `T` time: `reverse` flips the tensors that have a `T`. A state of several
    arrays is a dict.

    Class attributes:
        state_shape: the shape of the state in letters, or a dict of those of its arrays.
        start_matters: whether a token that starts a document computes something else than one that
            goes on from a state of zeros.
    """

    state_shape: str | dict[str, str]
    options = {"reverse": False}
    context = ("initial_state", "mask", "segment_ids", "previous_segment_id", "token_kind")
    start_matters = False

    @classmethod
    def finish(cls, results, options):
        output, final_state = results
        return (ops.flip(output, axis=1) if options["reverse"] else output), final_state

    def output_spec(self, tensors, sizes):
        state_shape = shape_of(self.state_shape, sizes)
        state = keras.KerasTensor(state_shape, dtype_of_sums(tensors))
        return super().output_spec(tensors, sizes), state

    @classmethod
    def cast_state(cls, state, tensors):
        """The state in the dtype that implementations take."""
        return ops.cast(state, dtype_of_sums(tensors))

    @classmethod
    def lower(cls, tensors, context, options):
        initial_state, mask, segment_ids, previous, kind = (context[name] for name in cls.context)
        if initial_state is not None:
            initial_state = cls.cast_state(initial_state, tensors)
        options = dict(options)
        if options.pop("reverse"):
            split_time.check_not_split("`reverse=True`")
            tensors = {
                name: ops.flip(t, axis=1) if t is not None and "T" in cls.shapes[name] else t
                for name, t in tensors.items()
            }
            mask, segment_ids = (
                None if t is None else ops.flip(t, axis=1) for t in (mask, segment_ids)
            )
        tokens = (mask, segment_ids, previous)
        marks_start = cls.start_matters and initial_state is None
        if kind is None and (marks_start or any(t is not None for t in tokens)):
            kind = token_kind(tensors[cls.output_like], *tokens, initial_state=initial_state)
        return {**tensors, "initial_state": initial_state, "token_kind": kind, **options}

    @classmethod
    def check(cls, tensors, context, options):
        cls._check_kind_alone(context, options)
        letters = cls.shapes | {
            **dict.fromkeys(("mask", "segment_ids", "token_kind"), "B T"),
            "previous_segment_id": "B",
        }
        if isinstance(cls.state_shape, str):
            letters["initial_state"] = cls.state_shape
        elif context.get("initial_state") is not None:
            context, of_state = cls._by_name(context, cls.state_shape)
            letters |= of_state
        given = tensors | context
        sizes = cls.check_tensors(given, letters)
        if sizes["T"] == 0:
            first = next(iter(cls.shapes))
            raise ValueError(
                f"`{cls.function}`: `{first}` must have at least one token; got the shape "
                f"{tuple(tensors[first].shape)} for [{', '.join(cls.shapes[first].split())}]."
            )
        for name, tensor in given.items():
            # Attention with a window of one token and a filter of one tap have empty states.
            if tensor is None or 0 not in tensor.shape or {"C", "W-1"} & {*letters[name].split()}:
                continue
            raise ValueError(
                f"`{cls.function}`: `{name}` must have no empty dimension; got the shape "
                f"{tuple(tensor.shape)} for [{', '.join(letters[name].split())}]. Leave out calls "
                "with nothing to compute."
            )
        return sizes

    @classmethod
    def _check_kind_alone(cls, context, options):
        if context.get("token_kind") is None:
            return
        names = ("mask", "segment_ids", "previous_segment_id")
        beside = [name for name in names if context.get(name) is not None]
        beside += ["reverse"] if options["reverse"] else []
        if beside:
            raise ValueError(
                f"`{cls.function}`: `token_kind` says all of mask, segments and what came before, "
                f"first token first; got `{beside[0]}` beside it. Leave one of them out."
            )

    @classmethod
    def _by_name(cls, context, shapes):
        """The arrays of a state as arguments by themselves, and their letters."""
        state = context["initial_state"]
        if not isinstance(state, dict) or set(state) != set(shapes):
            got = f"a dict of {sorted(state)}" if isinstance(state, dict) else type(state).__name__
            raise ValueError(
                f"`{cls.function}`: `initial_state` must be a dict of {sorted(shapes)}, as the "
                f"operation returns it; got {got}."
            )
        names = {name: f"initial_state[{name!r}]" for name in shapes}
        parts = {names[name]: state[name] for name in shapes}
        letters = {names[name]: shapes[name] for name in shapes}
        return context | {"initial_state": None} | parts, letters
