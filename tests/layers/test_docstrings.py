"""The examples in the docstrings run."""

import inspect
import re
import textwrap

import pytest

from keras_recurrent import layers


@pytest.mark.parametrize("name", [name for name in layers.__all__ if name != "StreamingLayer"])
def test_examples(name):
    examples = re.findall(
        r"```python\n(.*?)```", inspect.cleandoc(getattr(layers, name).__doc__), re.DOTALL
    )
    assert examples, "no example"
    for example in examples:
        exec(compile(textwrap.dedent(example), f"docstring of {name}", "exec"), {})
