"""The lists of names in docs/api/ are those that docs/site/reference.py writes."""

import importlib.util
import pathlib
import re

import pytest

SITE = pathlib.Path(__file__).parents[1] / "docs/site"


def load(name):
    spec = importlib.util.spec_from_file_location(name, SITE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def reference():
    return load("reference")


@pytest.mark.once
def test_lists_are_current(reference):
    outdated = [
        page.name for page in reference.PAGES if reference.generate(page) != page.read_text()
    ]
    assert outdated == [], "run `make tables`"


@pytest.mark.once
def test_entry_has_signature_first_sentence_and_methods(reference):
    page = reference.ROOT / "docs/api/griffin.md"
    name = "keras_recurrent.models.GriffinCausalLM"
    first, sentence, *methods = reference.entry(page, name, "")
    assert first.endswith(
        "`(backbone, preprocessor=None, compile=True, name=None, trainable=True)`\\"
    )
    assert sentence == "  Language model with Hawk or Griffin."
    assert any(
        line.startswith("    - `.generate(inputs=None, max_length=None, ") for line in methods
    )
    assert reference.entry(page, name, "inherited_members: false")[2:] == []


@pytest.mark.once
def test_site_shows_every_directive(reference):
    hook = load("reference_hook")
    for page in reference.PAGES:
        text = page.read_text()
        assert "\n::: " not in reference.SECTION.sub("", text)  # in comments on GitHub
        shown = hook.DIRECTIVES.sub(hook.expand, text)
        hidden = re.findall(r"<!--\n:::", shown)
        assert not hidden
        assert shown.count("\n::: ") == text.count("\n::: ")
        names = re.findall(r'<a id="(\S+)"></a>', text)
        assert all(f"(#{name})" in shown for name in names)
