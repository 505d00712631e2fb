"""Counts Python calls of this package's functions in layer calls, training and `generate`.

    python -m benchmarks.calls --backend torch             # --functions lists the functions

Each case is called three times, and `sys.setprofile` counts the third call. Python 3.12
and later make no calls for list comprehensions, so counts are lower there. A step of `fit` trains
two layers on two sequences, and `generate` makes 16 greedy tokens with them. The last line counts
the package's frames on the stack from `generate` to the first kernel of the prompt.
"""

import collections
import contextlib
import functools
import pathlib
import sys
import traceback

import keras
import numpy as np

import keras_recurrent
from benchmarks import make_parser
from keras_recurrent import dispatch
from keras_recurrent.layers import HGRN2, RGLRU
from keras_recurrent.models import GriffinCausalLM

PACKAGE = pathlib.Path(keras_recurrent.__file__).parent
FOLDERS = tuple(f"{folder.resolve()}/" for folder in (PACKAGE, PACKAGE / "backends"))
BATCH, LENGTH, WIDTH, NEW_TOKENS = 2, 10, 8, 16


@contextlib.contextmanager
def calling(function):
    """Calls a function with the frame of each Python call."""
    sys.setprofile(lambda frame, event, _: function(frame) if event == "call" else None)
    try:
        yield
    finally:
        sys.setprofile(None)


def count_calls(function):
    """Returns `{(file, function): calls}` of the third call of `function`."""
    calls: collections.Counter = collections.Counter()
    function()
    function()
    with calling(lambda frame: calls.update([frame.f_code])):
        function()
    found: collections.Counter = collections.Counter()
    for code, number in calls.items():
        if (file := package_file(code.co_filename)) is not None:
            found[file, code.co_name] += number
    return found


def package_file(name):
    """Resolves the path of a file of this package; returns None for other files."""
    file = str(pathlib.Path(name).resolve())
    return file if file.startswith(FOLDERS) else None


def make_model(num_layers):
    model = GriffinCausalLM.from_preset("hawk_tiny", num_layers=num_layers)
    model.compile("sgd", weighted_metrics=[], sampler="greedy")
    return model


def frames_to_first_kernel():
    """Returns `[(file, function)]` on the stack in the first RG-LRU kernel of `generate`."""
    kernel = dispatch.IMPLEMENTATIONS["rg_lru"][dispatch.BACKEND].function.__code__
    model, stack = make_model(num_layers=1), []

    def record(frame):
        if frame.f_code is kernel and not stack:
            stack.extend(frame for frame, _ in traceback.walk_stack(frame))

    with calling(record):
        model.generate("hello", max_length=12)
    codes = [frame.f_code for frame in reversed(stack)]
    files = [(package_file(code.co_filename), code.co_name) for code in codes]
    return [(file, name) for file, name in files if file is not None]


def cases():
    """Returns `{name: function without arguments}`."""
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, WIDTH)).astype("float32")
    x, mask = keras.ops.convert_to_tensor(x), keras.ops.ones((BATCH, LENGTH), "bool")
    found = {}
    for name, layer in {"RGLRU": RGLRU(num_blocks=4), "HGRN2": HGRN2(expand_ratio=4)}.items():
        _, state = layer(x, return_state=True)
        context = {"mask": mask, "initial_state": state, "return_state": True}
        found[f"{name}(x)"] = functools.partial(layer, x)
        found[f"{name}(x), mask and state"] = functools.partial(layer, x, **context)
    token_ids = np.ones((BATCH, LENGTH), "int32")
    found["step of fit"] = functools.partial(
        make_model(num_layers=2).train_on_batch,
        {"token_ids": token_ids, "padding_mask": token_ids},
        token_ids,
    )
    options = {"max_new_tokens": NEW_TOKENS, "stop_token_ids": None}
    found["generate"] = functools.partial(make_model(num_layers=2).generate, "hello", **options)
    return found


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--functions", action="store_true", help="also list calls by function")
    arguments = parser.parse_args()
    for name, function in cases().items():
        calls = count_calls(function)
        print(f"{name}: {calls.total()} calls in {len({file for file, _ in calls})} files")
        for (file, called), number in calls.most_common() if arguments.functions else ():
            print(f"  {number:4} {pathlib.Path(file).name}: {called}")
    frames = frames_to_first_kernel()
    print(f"generate to the first kernel: {len(frames)} frames")
    for file, called in frames if arguments.functions else ():
        print(f"       {pathlib.Path(file).name}: {called}")


if __name__ == "__main__":
    main()
