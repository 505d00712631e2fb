"""Dispatch: the implementation that runs, and how to choose it and ask for it."""

import os
import sys
import types

import keras
import numpy as np
import pytest

import keras_recurrent
from keras_recurrent import dispatch, ops
from keras_recurrent.backends.kernel import Kernel
from tests.ops import native, small

X = np.ones((1, 4, 2), "float32")


@pytest.mark.once
@pytest.mark.parametrize(
    ("interprets_triton", "on_jax", "on_torch"),
    [
        (False, ("pallas", "triton", "jax"), ("cudnn", "triton", "torch")),
        (True, ("pallas", "jax", "triton"), ("cudnn", "torch", "triton")),
    ],
)
def test_kernels_precede_the_plain_implementation_unless_interpreted(
    interprets_triton, on_jax, on_torch
):
    """The plain implementation, or Triton's interpreter, precedes a faster implementation."""
    expected = {"jax": on_jax, "torch": on_torch, "tensorflow": ("tensorflow",)}
    assert dispatch.preference(interprets_triton) == expected


def test_serving_implementations_depend_on_triton_interpret():
    """`TRITON_INTERPRET` is ignored or misread when the package is imported."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    assert dispatch.preference(interpreted)[dispatch.BACKEND] == dispatch.BACKEND_PREFERENCE


@pytest.fixture
def even_lengths_only(monkeypatch):
    """A faster implementation of `linear_scan` that supports even lengths, and returns its name."""

    def unsupported(x, log_a, initial_state=None, token_kind=None):
        return "needs an even length" if x.shape[1] % 2 else None

    def linear_scan(x, log_a, initial_state=None, token_kind=None):
        return "fast", "ran"

    kernel = Kernel(linear_scan, unsupported)
    backend = dispatch.BACKEND
    monkeypatch.setattr(dispatch, "BACKEND_PREFERENCE", ("fast", backend))
    for operation, row in dispatch.IMPLEMENTATIONS.items():
        reason = f"there is no backends/fast/{operation}.py"
        monkeypatch.setitem(row, "fast", kernel if operation == "linear_scan" else reason)


def scan(length=4, **options):
    """Returns "fast" if the faster implementation of `even_lengths_only` ran."""
    output, _ = ops.linear_scan(X[:, :length], -X[:, :length], **options)
    if isinstance(output, str):
        return output
    assert output.shape == (1, length, 2)
    return "plain"


def test_first_implementation_that_supports_the_arguments_runs(even_lengths_only):
    assert (scan(4), scan(3)) == ("fast", "plain")


def test_named_implementation_runs_or_raises_the_unsupported_reason(even_lengths_only):
    """A name in a call or in a context has no effect, or another implementation replaces it."""
    assert scan(implementation=dispatch.BACKEND) == "plain"
    with keras_recurrent.implementation(dispatch.BACKEND):
        assert scan() == "plain"
        with keras_recurrent.implementation("fast"):
            assert scan() == "fast"
        assert scan() == "plain"
    with pytest.raises(NotImplementedError, match="not fast: needs an even length"):
        scan(3, implementation="fast")
    with pytest.raises(NotImplementedError, match="there is no backends/fast/causal_conv1d"):
        ops.causal_conv1d(X, X[0], implementation="fast")


def replace_fields(monkeypatch, **fields):
    """Changes the `Kernel` of `even_lengths_only`."""
    row = dispatch.IMPLEMENTATIONS["linear_scan"]
    monkeypatch.setitem(row, "fast", row["fast"]._replace(**fields))


@pytest.mark.usefixtures("even_lengths_only")
def test_implementation_without_unsupported_runs_for_all_arguments(monkeypatch):
    replace_fields(monkeypatch, unsupported=None)
    assert scan(3) == "fast"


@pytest.mark.usefixtures("even_lengths_only")
def test_error_inside_a_kernel_is_raised(monkeypatch):
    """A bug in a kernel makes dispatch choose a slower implementation silently."""

    def broken(*args, **kwargs):
        raise RuntimeError("a bug")

    replace_fields(monkeypatch, function=broken)
    with pytest.raises(RuntimeError, match="a bug"):
        scan()


def test_which_implementation_gives_choice_and_reasons(even_lengths_only):
    """`which_implementation` reports another implementation than the one that runs."""
    which = keras_recurrent.which_implementation
    x = X[:, :3]
    choice = which("linear_scan", x, -x)
    assert choice.implementation == dispatch.BACKEND
    assert choice.refused == {"fast": "needs an even length"}
    portable = "linear_scan" in dispatch.SERVED_BY_PORTABLE
    folder = "keras_recurrent/portable" if portable else f"backends/{dispatch.BACKEND}"
    assert f"{folder}/linear_scan.py runs" in str(choice)
    assert "not fast: needs an even length" in str(choice)
    assert which(ops.linear_scan, X, -X).implementation == "fast"
    assert which("linear_scan", x, -x, implementation="fast").implementation is None


@pytest.mark.parametrize("operation", small.OPERATIONS)
def test_which_implementation_accepts_the_arguments_of_every_operation(operation):
    """`which_implementation` fails for an operation, or ignores a chosen implementation."""
    drawn = small.draw(operation)
    tensors, options = native.tensors(drawn).values(), drawn.options
    which = keras_recurrent.which_implementation
    for name in (operation, getattr(ops, operation)):
        choice = which(name, *tensors, **options)
        assert choice.implementation in dispatch.PREFERENCE[dispatch.BACKEND]
    with keras_recurrent.implementation(dispatch.BACKEND):
        assert which(operation, *tensors, **options).implementation == dispatch.BACKEND
    with pytest.raises(ValueError, match=f"`{operation}` takes no argument 'heads'"):
        which(operation, *tensors, **options, heads=None)


def test_unknown_names_raise_errors_that_list_the_known():
    which = keras_recurrent.which_implementation
    with (
        pytest.raises(ValueError, match="`implementation` must be one of"),
        keras_recurrent.implementation("cuda"),
    ):
        pass
    with pytest.raises(ValueError, match="`operation` must be one of causal_conv1d"):
        which("scan", X)
    with pytest.raises(ValueError, match="takes 2 tensors, x, log_a; got 3"):
        which("linear_scan", X, -X, X)


@pytest.fixture
def backends_folder(monkeypatch, tmp_path):
    """A folder `backends/fast` with one file, whose import fails."""
    name = "keras_recurrent.backends.fast"
    package = types.ModuleType(name)
    package.__path__ = [str(tmp_path)]
    (tmp_path / "linear_scan.py").write_text("import no_such_package")
    monkeypatch.setitem(sys.modules, name, package)
    return package


def test_missing_file_and_unavailable_folder_are_unsupported_reasons(backends_folder):
    """An operation without a file, or a folder whose package is missing, raises an error."""
    backends_folder.unavailable = lambda: "the package `no_such_package` is not installed"
    assert dispatch._implementation("fast", ["linear_scan", "rg_lru"]) == {
        "linear_scan": "the package `no_such_package` is not installed",
        "rg_lru": "there is no backends/fast/rg_lru.py",
    }


def test_import_error_of_an_available_folder_is_raised(backends_folder):
    """A broken import makes dispatch choose a slower implementation silently."""
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        dispatch._implementation("fast", ["linear_scan"])


def test_backend_without_implementations_raises_an_error(monkeypatch):
    monkeypatch.setattr(dispatch, "BACKEND", "numpy")
    monkeypatch.setattr(dispatch, "BACKEND_PREFERENCE", ())
    with pytest.raises(
        NotImplementedError, match=r"on numpy: nothing runs.* jax, torch, tensorflow"
    ):
        ops.linear_scan(X, -X)
    with pytest.raises(ValueError, match="must be one of 'portable' on the Keras backend 'numpy'"):
        ops.linear_scan(X, -X, implementation="torch")


def test_cached_checks_of_an_earlier_call_hide_no_errors():
    """On torch, invalid arguments are accepted after a call with similar, valid ones."""
    x, scale = np.ones((2, 3), "float32"), np.ones(3, "float32")
    x, scale, short = map(keras.ops.convert_to_tensor, (x, scale, scale[:2]))
    for _ in range(2):
        ops.rms_norm(x, scale, epsilon=1)
        for arguments in (
            {"scale": scale, "epsilon": True},
            {"scale": short, "epsilon": 1},
            {"scale": keras.ops.cast(scale, "int32"), "epsilon": 1},
        ):
            with pytest.raises(ValueError, match="`rms_norm`: "):
                ops.rms_norm(x, **arguments)
