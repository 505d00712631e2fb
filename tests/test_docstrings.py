"""The examples in public docstrings run."""

import doctest
import importlib
import inspect
import pkgutil
import re
import textwrap

import keras
import pytest

import keras_recurrent

# Two styles: `>>>` with what comes out, and a fenced program. Without imports it is a fragment.
BLOCK = re.compile(r"```python\n(\s*(?:import|from) .*?)```", re.DOTALL)

# Users call none of these, or need more than a backend, and not all can be imported everywhere.
WITHOUT_EXAMPLES = (
    "keras_recurrent.backends",
    "keras_recurrent.devices.torch",
    "keras_recurrent.evaluation.lm_evaluation_harness",
    "keras_recurrent.generation.torch",
    "keras_recurrent.lm_evaluation_harness",
    "keras_recurrent.serving.gate",
    "keras_recurrent.serving.metrics",
    "keras_recurrent.serving.server",
)


def documented():
    """{name: docstring} of what the modules define and show to users."""
    found = {}
    for info in pkgutil.walk_packages(keras_recurrent.__path__, "keras_recurrent."):
        if not info.name.startswith(WITHOUT_EXAMPLES):
            for name, item in vars(importlib.import_module(info.name)).items():
                if getattr(item, "__module__", None) == info.name and not name.startswith("_"):
                    found |= docstrings(f"{info.name}:{name}", item)
    return found


def docstrings(name, item):
    found = {name: item.__doc__ or ""}
    if inspect.isclass(item):
        for key, value in vars(item).items():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if inspect.isfunction(function) and not key.startswith("_"):
                found[f"{name}.{key}"] = function.__doc__ or ""
    return found


EXAMPLES = {
    name.removeprefix("keras_recurrent."): text
    for name, text in documented().items()
    if ">>>" in text or BLOCK.search(text)
}


ROOMS = [
    "callbacks",
    "datasets",
    "layers",
    "metrics",
    "models",
    "ops",
    "samplers",
    "schedules",
    "serving",
]
ROOMS += ["tokenizers"]


@pytest.mark.once
@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_has_an_example(room):
    public = getattr(keras_recurrent, room)
    homes = {name: getattr(public, name).__module__ for name in public.__all__}
    keys = {name: f"{home}:{name}".removeprefix("keras_recurrent.") for name, home in homes.items()}
    without = [name for name, key in keys.items() if key not in EXAMPLES]
    # Users do not construct a base class, or what functions and engines return or raise.
    returned = {"DecodingTime", "GenerationOutput", "MemorySizes", "TokenLogprobs", "TrainingSizes"}
    returned |= {"Completion", "Delta", "EngineClosed", "EngineFull", "EngineRequest"}
    assert set(without) <= {"StreamingLayer", *returned}


@pytest.mark.once
def test_models_explain_every_argument():
    """A class explains its arguments in order, including those that its base class explains."""
    classes = [item for item in vars(keras_recurrent.models).values() if inspect.isclass(item)]
    for cls in (cls for cls in classes if issubclass(cls, keras.Layer)):
        arguments = re.search(r"^Args:\n(.*?)\n\n", inspect.getdoc(cls), re.DOTALL | re.MULTILINE)[
            1
        ]
        explained = re.findall(r"^ {4}(\*\*\w+|\w+(?:, \w+)*):", arguments, re.MULTILINE)
        names = ", ".join(explained).replace("**", "").split(", ")
        assert names == list(inspect.signature(cls.__init__).parameters)[1:], cls


def shared(name):
    """XLA compiles each layer and model anew, and they have tests of their own on every backend."""
    once = name.startswith(("layers.", "models.", "checkpoints.", "gqa."))
    return pytest.param(name, marks=pytest.mark.once) if once else name


@pytest.mark.once
@pytest.mark.parametrize("name", [shared(name) for name in EXAMPLES])
def test_example(name):
    text = inspect.cleandoc(EXAMPLES[name])
    # No names but those that it imports itself: it is there to be copied.
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    report = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    doctest.DocTestRunner(optionflags=flags).run(test, out=report.append)
    assert not report, "".join(report)
    for block in BLOCK.findall(text):
        exec(textwrap.dedent(block), {})
