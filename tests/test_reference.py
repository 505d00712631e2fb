"""The lists of names in docs/api/ are those that docs/site/reference.py writes."""

import re

import pytest

from tests.scripts import load


@pytest.fixture(scope="module")
def reference():
    return load("docs/site/reference.py")


@pytest.mark.once
def test_lists_of_the_reference_are_current(reference):
    outdated = [
        page.name for page in reference.PAGES if reference.generate(page) != page.read_text()
    ]
    assert outdated == [], "run `make tables`"


@pytest.mark.once
def test_site_shows_every_directive_and_signatures_in_docstrings_only(reference):
    """A directive stays hidden, or the site has each signature twice: in the list, too."""
    hook, entries = load("docs/site/reference_hook.py"), []
    for page in reference.PAGES:
        text = page.read_text()
        assert "\n::: " not in reference.SECTION.sub("", text)  # in comments on GitHub
        shown = hook.DIRECTIVES.sub(hook.expand, text)
        assert "<!--\n:::" not in shown
        assert shown.count("\n::: ") == text.count("\n::: ")
        names = re.findall(r'<a id="(\S+)"></a>', text)
        assert all(f"(#{name})" in shown for name in names)
        entries += re.findall(r"^- \[`.*?`\]\(#.*?\)(.*)$", shown, re.MULTILINE)
    assert len(entries) > 100
    assert [entry for entry in entries if "`" in entry] == []
