"""Griffe extension that adapts the docstrings of this package to mkdocstrings.

- `Call arguments:` of layers becomes a list next to that of the constructor.
- `Returns:` becomes text. mkdocstrings would parse the words before a colon as a type.
- `>>>` examples become code blocks.
"""

import re
import textwrap

import griffe

SECTION = re.compile(r"^(Returns|Yields):\n((?:(?: {4}.*)?\n)*)", re.MULTILINE)
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?!\s*$).+)*", re.MULTILINE)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj, **kwargs):
        if obj.docstring:
            obj.docstring.value = convert_docstring(obj.docstring.value)


def convert_docstring(docstring):
    text = docstring.replace("\nCall arguments:\n", "\nOther Parameters: Call arguments:\n") + "\n"
    text = SECTION.sub(lambda m: f"**{m[1]}:**\n\n{textwrap.dedent(m[2])}\n", text)
    return EXAMPLE.sub(lambda m: f"{m[1]}```pycon\n{m[0]}\n{m[1]}```", text).rstrip()
