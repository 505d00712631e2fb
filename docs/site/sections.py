"""Docstrings of this package as the site shows them.

- `Call arguments:` of layers is a list of its own beside that of the constructor.
- `Returns:` is text, in which a colon is a colon: mkdocstrings would take what stands before it for
  a type.
- `>>>` examples are programs, not quotations in quotations.
"""

import re
import textwrap

import griffe

SECTION = re.compile(r"^(Returns|Yields):\n((?:(?: {4}.*)?\n)*)", re.MULTILINE)
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?!\s*$).+)*", re.MULTILINE)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj, **kwargs):
        if obj.docstring:
            obj.docstring.value = as_shown(obj.docstring.value)


def as_shown(docstring):
    text = docstring.replace("\nCall arguments:\n", "\nOther Parameters: Call arguments:\n") + "\n"
    text = SECTION.sub(lambda m: f"**{m[1]}:**\n\n{textwrap.dedent(m[2])}\n", text)
    return EXAMPLE.sub(lambda m: f"{m[1]}```pycon\n{m[0]}\n{m[1]}```", text).rstrip()
