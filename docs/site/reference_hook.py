"""Site hook for docs/api/: uncomments the directives, so that they expand to the docstrings."""

import re

DIRECTIVES = re.compile(r"^<!--\n(:::.*?)\n-->\n(.*?<!-- end -->\n)", re.DOTALL | re.MULTILINE)
ENTRY = re.compile(r'<a id="([\w.]+)"></a>(\[[^\]]*\])\([^)]*\)(?:`[^`\n]*`)?')
METHOD = re.compile(r"^    - `\..*\n", re.MULTILINE)


def on_page_markdown(markdown, page, config, files):
    if not page.file.src_uri.startswith("api/"):
        return markdown
    return DIRECTIVES.sub(expand, markdown)


def expand(match):
    """Returns the list with links to the docstrings after it, which have signatures and methods."""
    directives, names = match.groups()
    names = names.replace("\\\n", "  \n")  # Python-Markdown's form of a line break
    names = ENTRY.sub(r"\2(#\1)", METHOD.sub("", names))
    return f"{names}\n{directives}\n"
