"""What the public operations share: checks, token kinds, direction, and the call to a kernel."""

import inspect

import keras
from keras import ops, tree

from keras_recurrent import dispatch
from keras_recurrent.ops.token_kind import token_kind

FLOATS = ("float16", "bfloat16", "float32", "float64")


class RecurrentOperation(keras.Operation):
    """An operation over time, as a node of a Keras graph; `apply` is its way in.

    A subclass names its kernel and the shapes of its tensors in letters (`B` batch, `T` time; a
    letter may carry a factor, `2D`, or an offset, `W-1`). The tensor `output_like` gives the
    output its shape and dtype; those with a `T` are turned around by `reverse`. A state of several
    arrays is a dict. `options` are what else the kernel takes, known when a graph is made.
    """

    kernel: str
    shapes: dict[str, str]
    state_shape: str | dict[str, str]
    output_like: str = "x"  # not `output`, which is Keras's
    optional: tuple[str, ...] = ()
    # Whether a start afresh differs from going on from a state of zeros.
    start_matters = False

    def __init__(self, reverse=False, implementation=None, name=None, **options):
        super().__init__(name=name)
        self.reverse = reverse
        self.implementation = implementation
        self.options = options

    @classmethod
    def apply(cls, tensors, reverse, implementation, options=None, **context):
        """Run at once, or add a node to the graph when an argument is symbolic."""
        tensors, context, options = _convert(tensors), _convert(context), options or {}
        cls.check(tensors, context, **options)
        if _symbolic(tensors, context):
            return cls(reverse, implementation, **options).symbolic_call(**tensors, **context)
        arguments = cls.lower(tensors, reverse, **context, **options)
        output, final_state = dispatch.run(cls.kernel, arguments, implementation)
        return (ops.flip(output, axis=1) if reverse else output), final_state

    def call(self, **arguments):
        tensors = {name: arguments.pop(name) for name in self.shapes if name in arguments}
        return self.apply(tensors, self.reverse, self.implementation, self.options, **arguments)

    def compute_output_spec(self, **arguments):
        tensors = {name: arguments[name] for name in self.shapes if name in arguments}
        context = {name: value for name, value in arguments.items() if name not in tensors}
        return self.output_spec(tensors, self.check(tensors, context, **self.options))

    def output_spec(self, tensors, sizes):
        """What is returned, as `KerasTensor`s, from what `check` returned."""
        like = tensors[self.output_like]
        state_shape = shape_of(self.state_shape, sizes)
        return (
            keras.KerasTensor(like.shape, _dtype(like)),
            keras.KerasTensor(state_shape, _accumulation_dtype(tensors)),
        )

    @classmethod
    def cast_state(cls, state, tensors):
        """The state in the dtype that the kernel takes."""
        return ops.cast(state, _accumulation_dtype(tensors))

    @classmethod
    def lower(cls, tensors, reverse, initial_state, mask, segment_ids, previous_segment_id):
        """The kernel's keyword arguments."""
        if initial_state is not None:
            initial_state = cls.cast_state(initial_state, tensors)
        if reverse:
            tensors = {
                name: ops.flip(t, axis=1) if t is not None and "T" in cls.shapes[name] else t
                for name, t in tensors.items()
            }
            mask, segment_ids = (
                None if t is None else ops.flip(t, axis=1) for t in (mask, segment_ids)
            )
        context = (mask, segment_ids, previous_segment_id)
        marks_start = cls.start_matters and initial_state is None
        kind = None
        if marks_start or any(c is not None for c in context):
            kind = token_kind(tensors[cls.output_like], *context, initial_state=initial_state)
        return {**tensors, "initial_state": initial_state, "token_kind": kind}

    @classmethod
    def check(cls, tensors, context):
        """Raise for what no kernel can take; return the sizes behind the letters."""
        sizes: dict[str, int | None] = {}
        letters = cls.shapes | {"mask": "B T", "segment_ids": "B T", "previous_segment_id": "B"}
        if isinstance(cls.state_shape, str):
            letters["initial_state"] = cls.state_shape
        elif context.get("initial_state") is not None:
            context, of_state = cls._by_name(context, cls.state_shape)
            letters |= of_state
        given = {}
        for name, tensor in (tensors | context).items():
            if tensor is not None:
                given[name] = (tuple(tensor.shape), letters[name].split())
                check_dtype(cls.kernel, name, _dtype(tensor))
            elif name in cls.shapes and name not in cls.optional:
                raise ValueError(f"`{cls.kernel}` needs the argument `{name}`; got None.")
        for name, (shape, dims) in given.items():
            _check_rank(cls.kernel, name, shape, dims)
            for dim, size in zip(dims, shape, strict=True):
                if dim.isalpha() and sizes.get(dim) is None:
                    sizes[dim] = size
        for name, (shape, dims) in given.items():
            _check_sizes(cls.kernel, name, shape, dims, sizes)
        if sizes["T"] == 0:
            raise ValueError(f"`{cls.kernel}` needs at least one token; got a sequence of none.")
        for name, (shape, dims) in given.items():
            # A state of attention to one token alone has no room, and a filter of one tap no past.
            if 0 in shape and "C" not in dims and "W-1" not in dims:
                raise ValueError(
                    f"`{cls.kernel}`: `{name}` must have no empty dimension; got the shape "
                    f"{shape} for [{', '.join(dims)}]. Leave out calls with nothing to compute."
                )
        return sizes

    @classmethod
    def _by_name(cls, context, shapes):
        """The arrays of a state as arguments by themselves, and their letters."""
        state = context["initial_state"]
        if not isinstance(state, dict) or set(state) != set(shapes):
            got = f"a dict of {sorted(state)}" if isinstance(state, dict) else type(state).__name__
            raise ValueError(
                f"`{cls.kernel}`: `initial_state` must be a dict of {sorted(shapes)}, as the "
                f"operation returns it; got {got}."
            )
        names = {name: f"initial_state[{name!r}]" for name in shapes}
        parts = {names[name]: state[name] for name in shapes}
        letters = {names[name]: shapes[name] for name in shapes}
        return context | {"initial_state": None} | parts, letters

    def get_config(self):
        return {
            "name": self.name,
            "reverse": self.reverse,
            "implementation": self.implementation,
            **self.options,
        }


def which_implementation(
    operation,
    *tensors,
    initial_state=None,
    mask=None,
    segment_ids=None,
    previous_segment_id=None,
    reverse=False,
    implementation=None,
    **options,
):
    """Tell which implementation would run an operation, and why not the others.

    Args:
        operation: a function of `keras_recurrent.ops`, or its name.
        *tensors: its tensors, in its order.
        initial_state, mask, segment_ids, previous_segment_id, reverse, implementation: as the
            operation takes them.
        **options: what else the operation takes, such as `sliding_window`.

    Returns:
        A `Choice`: `.implementation` is the name of a folder of `backends/`, or None if nothing
        would run, `.refused` is `{name: reason}` for those that were asked before. `str()` of it
        is a sentence.

    Raises:
        ValueError: the operation or the implementation is unknown, the operation would refuse the
            arguments itself, or a tensor is symbolic.

    Example:

    >>> import keras, keras_recurrent, numpy as np
    >>> x = np.ones((1, 4, 2), "float32")
    >>> choice = keras_recurrent.which_implementation("linear_scan", x, -x)
    >>> choice.implementation == keras.config.backend()
    True
    """
    name = getattr(operation, "__name__", operation)
    known = {cls.kernel: cls for cls in RecurrentOperation.__subclasses__()}
    if name not in known:
        raise ValueError(f"`operation` must be one of {', '.join(sorted(known))}; got {name!r}.")
    cls = known[name]
    if len(tensors) > len(cls.shapes):
        raise ValueError(
            f"`{name}` takes {len(cls.shapes)} tensors, {', '.join(cls.shapes)}; got "
            f"{len(tensors)}."
        )
    unknown = sorted(options.keys() - inspect.signature(cls.check).parameters.keys())
    if unknown:
        raise ValueError(f"`{name}` takes no argument {', '.join(map(repr, unknown))}.")
    named = _convert(dict(zip(cls.shapes, tensors, strict=False)))
    context = _convert(
        {
            "initial_state": initial_state,
            "mask": mask,
            "segment_ids": segment_ids,
            "previous_segment_id": previous_segment_id,
        }
    )
    missing = {argument: None for argument in cls.shapes if argument not in named}
    cls.check(named | missing, context, **options)
    if _symbolic(named, context):
        raise ValueError(
            "`which_implementation` needs tensors with values: the choice may depend on the "
            "device they are on. Got a symbolic KerasTensor."
        )
    arguments = cls.lower(named | missing, reverse, **context, **options)
    return dispatch.choose(name, arguments, implementation)


def shape_of(dims, sizes):
    """The shape that "B 2D W-1" stands for; None where a size is not known yet."""
    return tuple(_size(dim, sizes) for dim in dims.split())


def _convert(tensors):
    # Not `tree.map_structure`: a state kept as a layer's attribute is no plain dict any more.
    return {name: _convert_one(t) for name, t in tensors.items()}


def _convert_one(tensor):
    if isinstance(tensor, dict):
        return _convert(tensor)
    if tensor is None or isinstance(tensor, keras.KerasTensor):
        return tensor
    return ops.convert_to_tensor(tensor)


def _symbolic(tensors, context):
    return any(isinstance(t, keras.KerasTensor) for t in tree.flatten((tensors, context)))


def _dtype(tensor):
    return keras.backend.standardize_dtype(tensor.dtype)


def _accumulation_dtype(tensors):
    dtypes = [_dtype(t) for t in tree.flatten(tensors) if t is not None]
    return "float64" if "float64" in dtypes else "float32"


def _check_rank(operation, name, shape, dims):
    if len(shape) != len(dims):
        raise ValueError(
            f"`{operation}`: `{name}` must have the {len(dims)} dimensions [{', '.join(dims)}]; "
            f"got the shape {shape}."
        )


def _check_sizes(operation, name, shape, dims, sizes):
    for dim, size in zip(dims, shape, strict=True):
        expected = _size(dim, sizes)
        if None not in (expected, size) and expected != size:
            known = ", ".join(f"{letter} = {n}" for letter, n in sizes.items() if n is not None)
            raise ValueError(
                f"`{operation}`: `{name}` must have the shape [{', '.join(dims)}], with {known}; "
                f"got the shape {shape}: {dim} should be {expected}, not {size}."
            )


def _size(dim, sizes):
    """The number that `B`, `2D` or `W-1` stands for; None if it is not known yet."""
    letter = next(c for c in dim if c.isalpha())
    factor, offset = dim.split(letter)
    size = sizes.get(letter)
    return None if size is None else int(factor or 1) * size + int(offset or 0)


def check_dtype(operation, name, dtype):
    if name == "mask":
        good, wanted = dtype == "bool" or "int" in dtype, "boolean, True at real tokens"
    elif name in ("segment_ids", "previous_segment_id", "initial_state['position']"):
        good, wanted = "int" in dtype, "integers"
    else:
        good, wanted = dtype in FLOATS, f"one of {', '.join(FLOATS)}"
    if not good:
        raise ValueError(f"`{operation}`: `{name}` must be {wanted}; got {dtype}. Cast it first.")
