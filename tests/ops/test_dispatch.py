"""Which implementation runs, and how a user steers and asks."""

import os
import sys
import types

import keras
import numpy as np
import pytest

import keras_recurrent
from keras_recurrent import dispatch, ops
from keras_recurrent.backends.kernel import Kernel

X = np.ones((1, 4, 2), "float32")


@pytest.mark.once
def test_kernels_precede_the_plain_implementation():
    """Fails if a GPU or TPU gets the plain implementation although a kernel is available."""
    assert dispatch.preference(interprets_triton=False) == {
        "jax": ("pallas", "triton", "jax"),
        "torch": ("cudnn", "triton", "torch"),
        "tensorflow": ("tensorflow",),
    }


@pytest.mark.once
def test_interpreted_triton_kernels_come_last():
    """Fails if Triton's interpreter precedes an implementation that runs compiled code."""
    assert dispatch.preference(interprets_triton=True) == {
        "jax": ("pallas", "jax", "triton"),
        "torch": ("cudnn", "torch", "triton"),
        "tensorflow": ("tensorflow",),
    }


def test_the_environment_tells_whether_triton_is_interpreted():
    """Fails if `TRITON_INTERPRET` is ignored or misread when the package is imported."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    assert dispatch.serving() == dispatch.preference(interpreted)[dispatch.BACKEND]


@pytest.fixture
def picky(monkeypatch):
    """A faster implementation of `linear_scan` that refuses odd lengths and says who ran."""

    def unsupported(x, log_a, initial_state=None, token_kind=None):
        return "needs an even length" if x.shape[1] % 2 else None

    def linear_scan(x, log_a, initial_state=None, token_kind=None):
        return "picky", "ran"

    kernel = Kernel(linear_scan, unsupported)
    backend = dispatch.BACKEND
    monkeypatch.setitem(dispatch.PREFERENCE, backend, ("picky", backend))
    for operation, row in dispatch.IMPLEMENTATIONS.items():
        reason = f"there is no backends/picky/{operation}.py"
        monkeypatch.setitem(row, "picky", kernel if operation == "linear_scan" else reason)


def test_the_first_willing_one_runs(picky):
    assert ops.linear_scan(X, -X) == ("picky", "ran")
    assert ops.linear_scan(X[:, :3], -X[:, :3])[0].shape == (1, 3, 2)


def test_a_named_one_runs_or_says_why_not(picky):
    assert ops.linear_scan(X, -X, implementation=dispatch.BACKEND)[0].shape == (1, 4, 2)
    with keras_recurrent.implementation(dispatch.BACKEND):
        assert ops.linear_scan(X, -X)[0].shape == (1, 4, 2)
        with keras_recurrent.implementation("picky"):
            assert ops.linear_scan(X, -X) == ("picky", "ran")
        assert ops.linear_scan(X, -X)[0].shape == (1, 4, 2)
    with pytest.raises(NotImplementedError, match="not picky: needs an even length"):
        ops.linear_scan(X[:, :3], -X[:, :3], implementation="picky")
    with pytest.raises(NotImplementedError, match="there is no backends/picky/causal_conv1d"):
        ops.causal_conv1d(X, X[0], implementation="picky")


def test_an_error_inside_a_kernel_is_not_covered_up(picky, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("a bug")

    monkeypatch.setitem(dispatch.IMPLEMENTATIONS["linear_scan"], "picky", Kernel(broken))
    with pytest.raises(RuntimeError, match="a bug"):
        ops.linear_scan(X, -X)


def test_which_implementation_tells(picky):
    choice = keras_recurrent.which_implementation("linear_scan", X[:, :3], -X[:, :3])
    assert choice.implementation == dispatch.BACKEND
    assert choice.refused == {"picky": "needs an even length"}
    assert f"backends/{dispatch.BACKEND}/linear_scan.py runs" in str(choice)
    assert "not picky: needs an even length" in str(choice)
    assert keras_recurrent.which_implementation(ops.linear_scan, X, -X).implementation == "picky"
    nothing = keras_recurrent.which_implementation(
        "linear_scan", X[:, :3], -X[:, :3], implementation="picky"
    )
    assert nothing.implementation is None


def test_unknown_names():
    with (
        pytest.raises(ValueError, match="`implementation` must be one of"),
        keras_recurrent.implementation("cuda"),
    ):
        pass
    with pytest.raises(ValueError, match="`operation` must be one of causal_conv1d"):
        keras_recurrent.which_implementation("scan", X)
    with pytest.raises(ValueError, match="takes 2 tensors, x, log_a; got 3"):
        keras_recurrent.which_implementation("linear_scan", X, -X, X)
    with pytest.raises(ValueError, match="takes no argument 'sliding_window'"):
        keras_recurrent.which_implementation("linear_scan", X, -X, sliding_window=3)


@pytest.fixture
def folder(monkeypatch):
    """A folder of `backends/` that implements a single operation."""
    name = "keras_recurrent.backends.picky"
    package = types.ModuleType(name)
    package.__path__ = []
    monkeypatch.setitem(sys.modules, name, package)
    return package


def test_what_a_folder_misses_is_a_reason(folder, tmp_path):
    """A file of an operation first, then what all of the folder needs."""
    folder.__path__ = [str(tmp_path)]
    (tmp_path / "linear_scan.py").write_text("import no_such_package")
    folder.unavailable = lambda: "the package `no_such_package` is not installed"
    row = dispatch._implementation("picky", ["linear_scan", "rg_lru"])
    assert row == {
        "linear_scan": "the package `no_such_package` is not installed",
        "rg_lru": "there is no backends/picky/rg_lru.py",
    }


def test_an_error_in_an_import_is_not_covered_up(folder, tmp_path):
    (tmp_path / "linear_scan.py").write_text("import no_such_package")
    folder.__path__ = [str(tmp_path)]
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        dispatch._implementation("picky", ["linear_scan"])


def test_an_implementation_without_a_rule_takes_everything(picky, monkeypatch):
    row = dispatch.IMPLEMENTATIONS["linear_scan"]
    monkeypatch.setitem(row, "picky", row["picky"]._replace(unsupported=None))
    assert ops.linear_scan(X[:, :3], -X[:, :3]) == ("picky", "ran")


def test_a_backend_without_implementations_refuses(monkeypatch):
    monkeypatch.setattr(dispatch, "BACKEND", "numpy")
    with pytest.raises(
        NotImplementedError, match=r"on numpy: nothing runs.* jax, torch, tensorflow"
    ):
        ops.linear_scan(X, -X)
    with pytest.raises(ValueError, match="must be one of 'portable' on the Keras backend 'numpy'"):
        ops.linear_scan(X, -X, implementation="torch")


def test_checks_of_earlier_calls_hide_no_errors():
    """On torch, arguments like those of an earlier call are not checked again."""
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
