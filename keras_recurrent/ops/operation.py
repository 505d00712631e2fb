"""What the public operations share: their checks, their nodes in graphs, the way to dispatch."""

import keras
from keras import ops

from keras_recurrent import dispatch
from keras_recurrent.checks.dtypes import check_dtype, dtype_of
from keras_recurrent.checks.shapes import check_rank_known, fits

OPERATIONS: dict[str, type["Operation"]] = {}


class Operation(keras.Operation):
    """An operation, which may be a node of a Keras graph. Its public function calls `apply`.

    Class attributes:
        function: the name of the public function, and of the files in `backends/`.
        shapes: the shapes of its tensors in letters: `D` channels. A letter may carry a factor,
            `2D`, or an offset, `W-1`; `...` at the front is any number of axes; a number is itself.
        output_like: the tensor that gives the output its shape and dtype.
        optional: the tensors that may be None.
        options: `{name: default}` of further arguments of an implementation, which are no tensors
            and are known when a graph is made.
        context: the tensors that implementations take in another form, made by `lower`.
        parameters: the tensors of the public function, in its order, where they are not those of
            `shapes`; `expand` then makes these of them.
        shown: `{name: what errors call a tensor}`, where that is not its name.
        int8: the tensors that are of that dtype.
    """

    function: str
    shapes: dict[str, str]
    output_like: str = "x"  # not `output`, which is Keras's
    optional: tuple[str, ...] = ()
    options: dict = {}
    context: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    shown: dict[str, str] = {}
    int8: tuple[str, ...] = ()

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "function" in vars(cls):
            OPERATIONS[cls.function] = cls

    def __init__(self, implementation=None, name=None, **options):
        super().__init__(name=name)
        self.implementation = implementation
        self.options = type(self).options | options

    @classmethod
    def apply(cls, tensors, implementation, options=None, **context):
        """Compute at once, or add a node to the graph where an argument is symbolic."""
        tensors, context = convert(cls.function, tensors), convert(cls.function, context)
        options = options or {}
        cls.check(tensors, context, options)
        if symbolic(tensors, context):
            return cls(implementation, **options).symbolic_call(**tensors, **context)
        arguments = cls.lower(tensors, context, options)
        return cls.finish(dispatch.run(cls.function, arguments, implementation), options)

    @classmethod
    def expand(cls, given):
        """The tensors of `shapes`, as far as they are given, from a dict of the `parameters`."""
        return given

    @classmethod
    def lower(cls, tensors, context, options):
        """The keyword arguments of an implementation."""
        return {**tensors, **options}

    @classmethod
    def finish(cls, results, options):
        """What the public function returns, from the results of an implementation."""
        return results

    def call(self, **arguments):
        tensors = {name: arguments.pop(name) for name in self.shapes if name in arguments}
        return self.apply(tensors, self.implementation, self.options, **arguments)

    def rematerialized_call(self, call, *args, **kwargs):
        # Implementations keep little more than their tensors; TensorFlow refuses keywords here.
        return call

    def compute_output_spec(self, **arguments):
        tensors = {name: arguments.pop(name) for name in self.shapes if name in arguments}
        return self.output_spec(tensors, self.check(tensors, arguments, self.options))

    def output_spec(self, tensors, sizes):
        """What is returned, as `KerasTensor`s, from what `check` returned."""
        like = tensors[self.output_like]
        return keras.KerasTensor(like.shape, dtype_of(like))

    @classmethod
    def check(cls, tensors, context, options):
        """Raise for what no implementation can take; return the sizes behind the letters."""
        return cls.check_tensors(tensors, cls.shapes)

    @classmethod
    def check_tensors(cls, tensors, letters):
        sizes: dict[str, int | tuple | None] = {}
        given = {}
        for name, tensor in tensors.items():
            if tensor is not None:
                shown = cls.shown.get(name, name)
                check_rank_known(cls.function, shown, tensor)
                given[shown] = (tuple(tensor.shape), letters[name].split())
                check_dtype(cls.function, shown, dtype_of(tensor), name in cls.int8)
            elif name in cls.shapes and name not in cls.optional:
                raise ValueError(f"`{cls.function}` needs the argument `{name}`; got None.")
        for name, (shape, dims) in given.items():
            _check_rank(cls.function, name, shape, dims)
            for dim, size in zip(dims, _parts(shape, dims), strict=True):
                if (dim.isalpha() or dim == "...") and sizes.get(dim) is None:
                    sizes[dim] = size
        for name, (shape, dims) in given.items():
            _check_sizes(cls.function, name, shape, dims, sizes)
        return sizes

    def get_config(self):
        return {"name": self.name, "implementation": self.implementation, **self.options}


def which_implementation(operation, *tensors, implementation=None, **arguments):
    """Tell which implementation would run an operation, and why not the others.

    Args:
        operation: a function of `keras_recurrent.ops`, or its name.
        *tensors: its tensors, in its order.
        implementation: as the operation takes it.
        **arguments: what else the operation takes, such as `initial_state`, `mask`, `segment_ids`,
            `reverse` or `sliding_window`.

    Returns:
        A `Choice`: `.implementation` is the name of a folder of `backends/`, or None if nothing
        would run, `.refused` is `{name: reason}` for those that were asked before. `str()` of it
        is a sentence.

    Raises:
        ValueError: the operation or the implementation is unknown, the operation would refuse the
            arguments itself, or a tensor is symbolic, or traced by JAX.

    Example:

    >>> import keras, keras_recurrent, numpy as np
    >>> x = np.ones((1, 4, 2), "float32")
    >>> choice = keras_recurrent.which_implementation("linear_scan", x, -x)
    >>> choice.implementation == keras.config.backend()
    True
    """
    name = getattr(operation, "__name__", operation)
    if name not in OPERATIONS:
        raise ValueError(
            f"`operation` must be one of {', '.join(sorted(OPERATIONS))}; got {name!r}."
        )
    cls = OPERATIONS[name]
    parameters = cls.parameters or tuple(cls.shapes)
    if len(tensors) > len(parameters):
        raise ValueError(
            f"`{name}` takes {len(parameters)} tensors, {', '.join(parameters)}; got "
            f"{len(tensors)}."
        )
    unknown = sorted(arguments.keys() - {*parameters, *cls.context, *cls.options})
    if unknown:
        raise ValueError(f"`{name}` takes no argument {', '.join(map(repr, unknown))}.")
    given = cls.expand(arguments | dict(zip(parameters, tensors, strict=False)))
    named = convert(name, {argument: given.get(argument) for argument in cls.shapes})
    context = convert(name, {argument: given.get(argument) for argument in cls.context})
    options = {option: given.get(option, cls.options[option]) for option in cls.options}
    cls.check(named, context, options)
    if symbolic(named, context):
        raise ValueError(
            "`which_implementation` needs tensors with values: the choice may depend on the "
            "device they are on. Got a symbolic KerasTensor."
        )
    native = cls.lower(named, context, options)
    if dispatch.is_traced(native):
        raise ValueError(
            "`which_implementation` needs tensors with values. Got some of a program that JAX "
            "traces: what runs is chosen when it is lowered for a platform."
        )
    return dispatch.choose(name, native, implementation)


def shape_of(dims, sizes):
    """The shape that "B 2D W-1" stands for; None where a size is not known yet."""
    return tuple(_size(dim, sizes) for dim in dims.split())


def convert(operation, tensors):
    """As tensors, but for Nones and symbols; errors name the operation and the argument."""
    # Not `tree.map_structure`: Keras replaces a dict that becomes an attribute of a layer by one
    # of its own class.
    return {name: _convert_one(operation, name, t) for name, t in tensors.items()}


def _convert_one(operation, name, tensor):
    if isinstance(tensor, dict):
        return convert(operation, tensor)
    if tensor is None or isinstance(tensor, keras.KerasTensor):
        return tensor
    try:
        return ops.convert_to_tensor(tensor)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`{operation}`: `{name}` must be a tensor, or numbers that `numpy.asarray` makes an "
            f"array of; got {type(tensor).__name__}: {error}"
        ) from error


def symbolic(*groups):
    """Whether a tensor is, in these dicts of them."""
    # Not `tree.flatten`, which takes longer than all checks together.
    return any(
        symbolic(t) if isinstance(t, dict) else isinstance(t, keras.KerasTensor)
        for tensors in groups
        for t in tensors.values()
    )


def _parts(shape, dims):
    """The sizes that the letters stand for; those of `...` are together."""
    if dims[0] != "...":
        return shape
    leading = len(shape) - len(dims) + 1
    return (shape[:leading], *shape[leading:])


def _check_rank(operation, name, shape, dims):
    least = len(dims) - (dims[0] == "...")
    if len(shape) < least or (len(shape) > least and dims[0] != "..."):
        wanted = f"at least {least}" if dims[0] == "..." else str(least)
        wanted += " dimension" if least == 1 else " dimensions"
        raise ValueError(
            f"`{operation}`: `{name}` must have {wanted}, [{', '.join(dims)}]; got the shape "
            f"{shape}."
        )


def _check_sizes(operation, name, shape, dims, sizes):
    for dim, size in zip(dims, _parts(shape, dims), strict=True):
        expected = _size(dim, sizes)
        if not _agree(expected, size):
            known = ", ".join(f"{letter} = {n}" for letter, n in sizes.items() if n is not None)
            wanted = "" if dim.isdigit() else f": {dim} should be {expected}, not {size}"
            raise ValueError(
                f"`{operation}`: `{name}` must have the shape [{', '.join(dims)}], with {known}; "
                f"got the shape {shape}{wanted}."
            )


def _agree(expected, size):
    if isinstance(expected, tuple):
        return fits(size, expected)
    return None in (expected, size) or expected == size


def _size(dim, sizes):
    """What `B`, `2D`, `W-1`, `2` or `...` stands for; None if it is not known yet."""
    if dim == "...":
        return sizes[dim]
    if dim.isdigit():
        return int(dim)
    letter = next(c for c in dim if c.isalpha())
    factor, offset = dim.split(letter)
    size = sizes.get(letter)
    return None if size is None else int(factor or 1) * size + int(offset or 0)
