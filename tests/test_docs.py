"""Statements, examples and links of README and the manual."""

import os
import pydoc
import re
import sys
import types

import keras
import pytest

import keras_recurrent
from keras_recurrent.backends.signatures import DECODING_STEPS, SIGNATURES
from tests import scripts
from tests.processes import ROOT

DOCS = ROOT / "docs"
REFERENCE = sorted(DOCS.glob("api/*.md"))
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (
        *ROOT.glob("*.md"),
        *DOCS.rglob("*.md"),
        *ROOT.glob("guides/**/*.md"),
        *ROOT.glob("benchmarks/**/*.md"),
        *ROOT.glob("tests/*.md"),
    )
}


@pytest.fixture(scope="module")
def tables():
    """Module docs/site/tables.py, which generates the tables of the manual."""
    return scripts.load("docs/site/tables.py")


@pytest.mark.once
def test_table_of_implementations_has_every_folder(tables):
    operations = {*SIGNATURES, *DECODING_STEPS}
    files = [file for file in ROOT.glob("backends/*/*.py") if file.stem in operations]
    listed = {name for names in tables.FOLDERS for name in names}
    assert listed == {"portable", *(file.parent.name for file in files)}


@pytest.mark.once
@pytest.mark.parametrize(
    "name",
    [
        *("griffin", "hgrn2", "transnormer", "lightning_hybrid", "mamba_hybrid", "lfm2"),
        *("vision", "implementations"),
    ],
)
def test_generated_tables_are_current(tables, name, monkeypatch):
    """A table differs from the output of `make tables`; memory is compared for tiny models only."""
    memory_sizes, unknown = tables.memory_sizes, types.SimpleNamespace(parameters=0, cache=0)

    def sizes_of_tiny_models(preset, **arguments):
        return memory_sizes(preset, **arguments) if preset.endswith("_tiny") else unknown

    monkeypatch.setattr(tables, "memory_sizes", sizes_of_tiny_models)
    ((page, table),) = (
        (page, makes[name]) for page, makes in tables.TABLES.items() if name in makes
    )
    (written,) = tables.table_pattern(name).findall(PAGES[f"docs/{page}"])
    for line, expected in zip(written.splitlines(), table().splitlines(), strict=True):
        if expected.endswith(" | 0 kB | 0 kB |"):
            line, expected = (text.rsplit(" | ", 2)[0] for text in (line, expected))
        assert line == expected


def examples(on_jax=False):
    """Yields the examples of README and the manual, or those that import JAX."""
    for page, text in PAGES.items():
        if page == "README.md" or page.startswith("docs/"):
            for number, example in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL)):
                if ("import jax" in example) == on_jax:
                    yield pytest.param(example, id=f"{page}-{number}")


@pytest.mark.once
@pytest.mark.parametrize("example", list(examples()))
def test_example_of_the_manual_runs(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    example = example.replace('"griffin_tiny_text"', '"griffin_tiny", num_layers=1')
    exec(re.sub(r"\bepochs=\d+", "epochs=1", example), {})


@pytest.mark.skipif(keras.config.backend() != "jax", reason="the examples are of JAX")
@pytest.mark.parametrize("example", list(examples(on_jax=True)))
def test_example_of_jax_runs(example):
    exec(example, {})


def headings(text):
    """Returns the anchors of a page on GitHub and on the site."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "") for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in plain}


def documented_names(text):
    """Returns the names that a page of the reference takes from docstrings."""
    return re.findall(r"^::: (\S+)$", text, re.MULTILINE)


def dead_links(page, text):
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", text):
        path = ROOT / os.path.normpath((ROOT / page).parent / target) if target else ROOT / page
        name = path.relative_to(ROOT).as_posix()
        if not path.exists():
            yield f"{page}: {target} is not there"
        elif anchor and name not in PAGES:
            yield f"{page}: {target}#{anchor} is in no page"
        elif anchor and anchor not in headings(PAGES[name]):
            parents = [n for n in documented_names(PAGES[name]) if f"{anchor}.".startswith(f"{n}.")]
            if not parents or pydoc.locate(anchor) is None:
                yield f"{page}: {target}#{anchor} is not there"


@pytest.mark.once
def test_links_of_all_pages_lead_to_files_and_headings():
    assert [dead for page, text in PAGES.items() for dead in dead_links(page, text)] == []


def find_object(name):
    """Returns an object by its name, or None. An attribute precedes a module of the same name."""
    module, _, attribute = name.rpartition(".")
    public = getattr(sys.modules.get(module), attribute, None)
    return pydoc.locate(name) if public is None else public


@pytest.mark.once
def test_every_public_name_is_in_the_reference():
    """A public name is missing, is listed twice, or does not exist."""
    listed = [name for path in REFERENCE for name in documented_names(path.read_text())]
    assert len(listed) == len(set(listed))
    names = [name for name in listed if "torch_" not in name and "harness" not in name]
    found = [find_object(name) for name in names]
    assert None not in found
    public = [getattr(keras_recurrent, name) for name in keras_recurrent.__all__]
    modules = [keras_recurrent, *(item for item in public if isinstance(item, types.ModuleType))]
    assert [
        f"{module.__name__}.{name}"
        for module in modules
        for name in module.__all__
        if not isinstance(item := getattr(module, name), types.ModuleType)
        and not any(item is one for one in found)
    ] == []


@pytest.mark.once
def test_citation_and_pages_have_the_version_of_the_package():
    version = keras_recurrent.__version__
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    for page in ("install", "cite", "stability"):
        assert version in PAGES[f"docs/{page}.md"], page
