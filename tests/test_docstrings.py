"""Examples and arguments in public docstrings."""

import doctest
import importlib
import inspect
import pkgutil
import re
import textwrap

import keras
import pytest

import keras_recurrent

# Examples are lines after `>>>` with their results, or programs, which begin with imports.
BLOCK = re.compile(r"```python\n(\s*(?:import|from) .*?)```", re.DOTALL)

# Users do not call these modules, or they need further packages.
WITHOUT_EXAMPLES = (
    "keras_recurrent.backends",
    "keras_recurrent.devices.torch",
    "keras_recurrent.evaluation.lm_evaluation_harness",
    "keras_recurrent.generation.torch_",
    "keras_recurrent.lm_evaluation_harness",
    "keras_recurrent.optimizers.fused_updates",
    "keras_recurrent.serving.gate",
    "keras_recurrent.serving.metrics",
    "keras_recurrent.serving.server",
)


def documented():
    """Returns `{name: docstring}` of the public functions and classes of all modules."""
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


MODULES = "callbacks datasets layers metrics models ops samplers schedules serving tokenizers"


@pytest.mark.once
@pytest.mark.parametrize("module", MODULES.split())
def test_every_public_name_has_an_example(module):
    public = getattr(keras_recurrent, module)
    homes = {name: getattr(public, name).__module__ for name in public.__all__}
    keys = {name: f"{home}:{name}".removeprefix("keras_recurrent.") for name, home in homes.items()}
    without = [name for name, key in keys.items() if key not in EXAMPLES]
    # Users do not construct a base class, or what functions and engines return or raise.
    returned = {"GenerationOutput", "MemorySizes", "TokenLogprobs", "TrainingSizes"}
    returned |= {"Completion", "Delta", "EngineClosed", "EngineFull", "EngineRequest"}
    assert set(without) <= {"StreamingLayer", *returned}


@pytest.mark.once
def test_docstring_of_a_model_explains_every_argument():
    """A class explains its arguments in order, including those that its base class explains."""
    classes = [item for item in vars(keras_recurrent.models).values() if inspect.isclass(item)]
    for cls in (cls for cls in classes if issubclass(cls, keras.Layer)):
        arguments = re.search(r"^Args:\n(.*?)\n\n", inspect.getdoc(cls), re.DOTALL | re.MULTILINE)[
            1
        ]
        explained = re.findall(r"^ {4}(\*\*\w+|\w+(?:, \w+)*):", arguments, re.MULTILINE)
        names = ", ".join(explained).replace("**", "").split(", ")
        parameters = list(inspect.signature(cls.__init__).parameters)[1:]
        assert [name for name in names if name in parameters] == parameters, cls
        assert names == parameters or "kwargs" in parameters, cls


def distinct_examples():
    """Returns names of examples; classes that inherit an example are not repeated."""
    found = {}
    for name, text in EXAMPLES.items():
        lines = [example.source for example in doctest.DocTestParser().get_examples(text)]
        found.setdefault((*lines, *BLOCK.findall(text)), name)
    return list(found.values())


@pytest.mark.once
@pytest.mark.parametrize("name", distinct_examples())
def test_example_of_a_docstring_runs(name):
    text = inspect.cleandoc(EXAMPLES[name])
    # An example imports all that it needs, so that users can copy it.
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    report = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    doctest.DocTestRunner(optionflags=flags).run(test, out=report.append)
    assert not report, "".join(report)
    for block in BLOCK.findall(text):
        exec(textwrap.dedent(block), {})
