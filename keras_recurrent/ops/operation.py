"""Base class of operations: argument checks, nodes of Keras graphs, and dispatch."""

import functools
import inspect
import operator

import keras
from keras import ops

from keras_recurrent import dispatch
from keras_recurrent.backends.signatures import SIGNATURES, SUMS, Signature
from keras_recurrent.checks import tensors as tensor_checks
from keras_recurrent.checks.dtypes import dtype_of, sum_dtype
from keras_recurrent.compat import global_state

if dispatch.BACKEND == "torch":
    from keras_recurrent.backends.torch._autograd import is_eager

OPERATIONS: dict[str, type["Operation"]] = {}
_checked_keys: set = set()  # results of `_call_key` of eager calls on torch that passed all checks
_MAX_CHECKED_KEYS = 4096


class Operation(keras.Operation):
    """Base class of operations, which can be nodes of a Keras graph.

    Class attributes:
        function: the name of the public function, of the files in `backends/`, and of the
            signature, which lists tensors and results with their dimensions.
        options: `{name: default}` of further arguments of an implementation, which are not tensors
            and are known when a graph is made.
        context: `{name: dimensions}` of further tensors, which `lower` may change.
        signature, arguments, required: derived from the signature when the class is defined, so
            that calls do not parse it. `arguments` has an `Argument` for each tensor.
    """

    function: str
    options: dict = {}
    context: dict[str, str] = {}
    signature: Signature
    arguments: dict[str, tensor_checks.Argument]
    required: frozenset[str]

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "function" not in vars(cls):
            return
        OPERATIONS[cls.function] = cls
        keras.saving.register_keras_serializable(package="keras_recurrent")(cls)
        cls.signature = signature = SIGNATURES[cls.function]
        cls.required = frozenset(signature.tensors) - {*signature.optional}
        cls.arguments = cls._parse({**signature.tensors, **cls.context})

    @classmethod
    def _parse(cls, dimensions):
        return {name: tensor_checks.argument(name, text) for name, text in dimensions.items()}

    def __init__(self, implementation=None, name=None, **options):
        super().__init__(name=name)
        self.implementation = implementation
        self.options = type(self).options | options

    @classmethod
    def public_function(cls, declaration):
        """Decorates a function without a body: a call passes its arguments to `apply`."""
        names = tuple(inspect.signature(declaration).parameters)

        @functools.wraps(declaration)
        def function(*args, **kwargs):
            declaration(*args, **kwargs)  # raises Python's `TypeError` for wrong arguments
            return cls.apply({**dict(zip(names, args, strict=False)), **kwargs})

        return function

    @classmethod
    def apply(cls, arguments):
        """Computes the results, or adds a node to the graph if an argument is symbolic.

        arguments: `{name: value}` of the given arguments of the public function.
        """
        tensors, context, options = cls.split(arguments)
        implementation = arguments.get("implementation")
        key = _call_key(cls.function, tensors, context, options)
        if key is None or key not in _checked_keys:
            given = *tensors.values(), *context.values()
            tensors, context = convert(cls.function, tensors), convert(cls.function, context)
            cls.check(tensors, context, options)
            if symbolic(tensors, context):
                return cls(implementation, **options).symbolic_call(**tensors, **context)
            unchanged = all(map(operator.is_, given, (*tensors.values(), *context.values())))
            if key is not None and unchanged:
                _remember(key)
        arguments = cls.lower(tensors, context, options)
        function = dispatch.resolve(cls.function, arguments, implementation)
        return cls.finish(function(**arguments), options)

    @classmethod
    def split(cls, arguments):
        """Returns the tensors, the context and the options among arguments, three dicts.

        Variables are replaced by their values: `_call_key` returns None for a Keras variable.
        """
        groups = dict.fromkeys(cls.signature.tensors), dict.fromkeys(cls.context), {**cls.options}
        for group in groups:
            for name in group:
                if name in arguments:
                    value = arguments[name]
                    group[name] = value.value if isinstance(value, keras.Variable) else value
        return groups

    @classmethod
    def lower(cls, tensors, context, options):
        """Returns the keyword arguments of an implementation."""
        return {**tensors, **context, **options}

    @classmethod
    def finish(cls, results, options):
        """Returns the results of the public function from those of an implementation."""
        return results

    def call(self, **arguments):
        return self.apply({**arguments, **self.options, "implementation": self.implementation})

    def rematerialized_call(self, call, *args, **kwargs):
        # Not rematerialized: implementations save few residuals besides their inputs and outputs,
        # and TensorFlow's recomputation does not accept keyword arguments.
        return call

    def compute_output_spec(self, **arguments):
        tensors, context, _ = self.split(arguments)
        return self.output_spec(tensors, self.check(tensors, context, self.options))

    def output_spec(self, tensors, sizes):
        """Returns `KerasTensor`s of the results; `sizes` is the result of `check`."""
        specs = tuple(self._spec(result, tensors, sizes) for result in self.signature.results)
        return specs if len(specs) > 1 else specs[0]

    @classmethod
    def _spec(cls, result, tensors, sizes):
        if isinstance(result, dict):
            return {name: cls._spec(part, tensors, sizes) for name, part in result.items()}
        same = cls.signature.tensors.get(result.dtype) == result.dimensions
        if same:  # its shape may have sizes that are unknown in the first tensor
            shape = tensors[result.dtype].shape
        else:
            shape = tensor_checks.shape_of(result.dimensions, sizes)
        return keras.KerasTensor(shape, cls.result_dtype(result, tensors))

    @classmethod
    def result_dtype(cls, result, tensors):
        """Returns the dtype of a `Result` of the signature."""
        if result.dtype == SUMS:
            return sum_dtype(*tensors.values())
        like = tensors.get(result.dtype)
        return result.dtype if like is None else dtype_of(like)

    @classmethod
    def check(cls, tensors, context, options):
        """Raises an error for arguments that every implementation rejects.

        Returns `{dimension: size}`.
        """
        return cls.check_tensors({**tensors, **context})

    @classmethod
    def check_tensors(cls, tensors, arguments=None):
        """Checks dtypes and shapes; returns `{dimension: size}`."""
        arguments = cls.arguments if arguments is None else arguments
        return tensor_checks.check_tensors(cls.function, tensors, arguments, cls.required)

    def get_config(self):
        return {"name": self.name, "implementation": self.implementation, **self.options}


def _call_key(function, tensors, context, options):
    """Cache key: all that conversion and argument checks of an eager torch call depend on.

    Returns None for other calls. Checks take as long on the host as several launches.
    """
    given = *tensors.values(), *context.values(), *options.values()
    if dispatch.BACKEND != "torch" or not is_eager(given):
        return None
    kinds = [(x.shape, x.dtype, x.device) if hasattr(x, "shape") else (type(x), x) for x in given]
    return function, global_state.get_global_attribute("torch_device"), *kinds


def _remember(key):
    if len(_checked_keys) >= _MAX_CHECKED_KEYS:
        _checked_keys.clear()
    _checked_keys.add(key)


def which_implementation(operation, *tensors, implementation=None, **arguments):
    """Returns the implementation that would run an operation, and why others would not.

    Args:
        operation: a function of `keras_recurrent.ops`, or its name.
        *tensors: the tensors of the operation, in order.
        implementation: the argument `implementation` of the operation.
        **arguments: other arguments of the operation, such as `initial_state`, `mask`,
            `segment_ids`, `reverse` or `sliding_window`.

    Returns:
        A `Choice`: `.implementation` is the name of a folder of `backends/`, or None if no
        implementation would run. `.refused` is `{name: reason}` for faster ones that cannot run.
        `str()` converts it to a sentence.

    Raises:
        ValueError: the operation or the implementation is unknown, the operation would raise a
            ValueError for the arguments, or a tensor is symbolic or traced by JAX.

    Example:

    >>> import keras, keras_recurrent, numpy as np
    >>> x = np.ones((1, 4, 2), "float32")
    >>> plain = keras.config.backend()
    >>> choice = keras_recurrent.which_implementation("linear_scan", x, -x, implementation=plain)
    >>> choice.implementation == plain
    True
    """
    name = getattr(operation, "__name__", operation)
    if name not in OPERATIONS:
        raise ValueError(
            f"`operation` must be one of {', '.join(sorted(OPERATIONS))}; got {name!r}."
        )
    cls = OPERATIONS[name]
    parameters = tuple(cls.signature.tensors)
    if len(tensors) > len(parameters):
        raise ValueError(
            f"`{name}` takes {len(parameters)} tensors, {', '.join(parameters)}; got "
            f"{len(tensors)}."
        )
    unknown = sorted(arguments.keys() - {*parameters, *cls.context, *cls.options})
    if unknown:
        raise ValueError(f"`{name}` takes no argument {', '.join(map(repr, unknown))}.")
    given = arguments | dict(zip(parameters, tensors, strict=False))
    named, context, options = cls.split(given)
    named, context = convert(name, named), convert(name, context)
    cls.check(named, context, options)
    if symbolic(named, context):
        raise ValueError(
            "`which_implementation` needs tensors with values, because the choice may depend on "
            "their device. Got a symbolic KerasTensor."
        )
    native = cls.lower(named, context, options)
    if dispatch.is_traced(native):
        raise ValueError(
            "`which_implementation` needs tensors with values. Got tensors of a program that JAX "
            "traces: the implementation is chosen when it is lowered for a platform."
        )
    return dispatch.choose(name, native, implementation)


def convert(operation, tensors):
    """Converts arguments to tensors, except None and symbolic tensors.

    Errors name the operation and the argument.
    """
    # Not `tree.map_structure`: Keras replaces a dict that is an attribute of a layer by another
    # class.
    converted = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, dict):
            tensor = convert(operation, tensor)
        elif tensor is not None and not isinstance(tensor, keras.KerasTensor):
            try:
                tensor = ops.convert_to_tensor(tensor)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"`{operation}`: `{name}` must be a tensor, or numbers that `numpy.asarray` "
                    f"can convert; got {type(tensor).__name__}: {error}"
                ) from error
        converted[name] = tensor
    return converted


def symbolic(*groups):
    """Returns True if any value of these dicts is a `KerasTensor`."""
    # Not `tree.flatten`, which takes longer than all checks together.
    for tensors in groups:
        for tensor in tensors.values():
            if isinstance(tensor, keras.KerasTensor):
                return True
            if isinstance(tensor, dict) and symbolic(tensor):
                return True
    return False
