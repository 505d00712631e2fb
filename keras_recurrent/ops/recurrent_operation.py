"""Base class of operations over time, with states, token kinds and direction."""

from keras import ops

from keras_recurrent import dispatch
from keras_recurrent.backends.signatures import TOKENS
from keras_recurrent.checks.arguments import check_boolean
from keras_recurrent.ops.operation import Operation
from keras_recurrent.ops.token_kind import kinds_of_tokens


class RecurrentOperation(Operation):
    """Base class of operations over time, which return `(output, final_state)`.

    `B` is the batch and `T` is time: `reverse` flips tensors with a dimension `T`. A state of
    several arrays is a dict.

    Class attributes:
        start_matters: boolean, whether the start of a document differs from a token that continues
            from a state of zeros.
        state_names: `{name: "initial_state[...]"}` of a state of several arrays.
    """

    options = {"reverse": False}
    context = {
        "initial_state": "",  # its dimensions are in the signature
        "mask": TOKENS,
        "segment_ids": TOKENS,
        "previous_segment_id": "B",
        "token_kind": TOKENS,
    }
    start_matters = False
    state_names: dict[str, str] = {}

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        state = cls.signature.state
        if isinstance(state, dict):
            cls.state_names = {name: f"initial_state[{name!r}]" for name in state}
            state = {cls.state_names[name]: state[name] for name in state}
        else:
            state = {"initial_state": state}
        cls.arguments = cls.arguments | cls._parse(state)

    @classmethod
    def finish(cls, results, options):
        output, final_state = results
        return (ops.flip(output, axis=1) if options["reverse"] else output), final_state

    @classmethod
    def cast_state(cls, state, tensors):
        """Casts the state to the dtypes that implementations take."""
        result = cls.signature.results[1]
        if not isinstance(result, dict):
            return ops.cast(state, cls.result_dtype(result, tensors))
        return {
            name: ops.cast(state[name], cls.result_dtype(part, tensors))
            for name, part in result.items()
        }

    @classmethod
    def lower(cls, tensors, context, options):
        initial_state, kind = context["initial_state"], context["token_kind"]
        mask, segment_ids = context["mask"], context["segment_ids"]
        previous = context["previous_segment_id"]
        if initial_state is not None:
            initial_state = cls.cast_state(initial_state, tensors)
        options = dict(options)
        if options.pop("reverse"):
            dispatch.check_not_split("`reverse=True`")
            tensors = {
                name: ops.flip(t, axis=1) if t is not None and "T" in dimensions else t
                for (name, t), dimensions in zip(
                    tensors.items(), cls.signature.tensors.values(), strict=True
                )
            }
            mask, segment_ids = (
                None if t is None else ops.flip(t, axis=1) for t in (mask, segment_ids)
            )
        marks_start = cls.start_matters and initial_state is None
        one_document = mask is None and segment_ids is None and previous is None
        if kind is None and (marks_start or not one_document):
            like = tensors[cls.signature.results[0].dtype]
            kind = kinds_of_tokens(like, mask, segment_ids, previous, initial_state)
        return {**tensors, "initial_state": initial_state, "token_kind": kind, **options}

    @classmethod
    def check(cls, tensors, context, options):
        check_boolean("reverse", options["reverse"])
        if context.get("token_kind") is not None:
            cls._check_kind_alone(context, options)
        if cls.state_names and context.get("initial_state") is not None:
            context = cls._flatten_state(context)
        given = {**tensors, **context}
        sizes = cls.check_tensors(given)
        if sizes["T"] == 0:
            first = next(iter(tensors))
            raise ValueError(
                f"`{cls.function}`: `{first}` must have at least one token; got the shape "
                f"{tuple(tensors[first].shape)} for [{', '.join(cls._dimensions(first))}]."
            )
        for name, tensor in given.items():
            if tensor is None or 0 not in tensor.shape:
                continue
            # Attention with a window of one token and a filter of one tap have empty states.
            if {"C", "W-1"} & {*cls._dimensions(name)}:
                continue
            raise ValueError(
                f"`{cls.function}`: `{name}` must have no empty dimension; got the shape "
                f"{tuple(tensor.shape)} for [{', '.join(cls._dimensions(name))}]. Skip the call if "
                "there is nothing to compute."
            )
        if "G" in sizes and sizes["H"] % sizes["G"]:
            groups, heads = (
                " and ".join(f"`{name}`" for name in tensors if axis in cls._dimensions(name))
                for axis in ("G", "H")
            )
            raise ValueError(
                f"`{cls.function}`: the number of heads of {groups}, {sizes['G']}, must divide "
                f"that of {heads}, {sizes['H']}, because equal groups of heads share {groups}."
            )
        return sizes

    @classmethod
    def _dimensions(cls, name):
        return cls.arguments[name].dimensions.names

    @classmethod
    def _check_kind_alone(cls, context, options):
        names = ("mask", "segment_ids", "previous_segment_id")
        redundant = [name for name in names if context.get(name) is not None]
        redundant += ["reverse"] if options["reverse"] else []
        if redundant:
            raise ValueError(
                f"`{cls.function}`: got both `token_kind` and `{redundant[0]}`. `token_kind` "
                "includes masks and segments, and is not reversed. Leave one of them out."
            )

    @classmethod
    def _flatten_state(cls, context):
        """Replaces a state by its arrays, as separate arguments."""
        state, names = context["initial_state"], cls.state_names
        if not isinstance(state, dict) or set(state) != set(names):
            got = f"a dict of {sorted(state)}" if isinstance(state, dict) else type(state).__name__
            raise ValueError(
                f"`{cls.function}`: `initial_state` must be a dict of {sorted(names)}, as the "
                f"operation returns it; got {got}."
            )
        parts = {names[name]: state[name] for name in names}
        return context | {"initial_state": None} | parts
