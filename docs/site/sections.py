"""Griffe extension that adapts the docstrings of this package to mkdocstrings.

- Classes with the decorator `inherits_docstring` have the sections of their base class.
- `Call arguments:` of layers becomes a list next to that of the constructor.
- `Returns:` becomes text. mkdocstrings would parse the words before a colon as a type.
- `>>>` examples become code blocks.
"""

import pathlib
import re
import runpy
import textwrap

import griffe

SECTION = re.compile(r"^(Returns|Yields):\n((?:(?: {4}.*)?\n)*)", re.MULTILINE)
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n(?!\s*$).+)*", re.MULTILINE)
PACKAGE = pathlib.Path(__file__).parents[2] / "keras_recurrent"
complete_docstring = runpy.run_path(str(PACKAGE / "inherited_docstrings.py"))["complete_docstring"]


class Docstrings(griffe.Extension):
    def on_package(self, *, pkg, **kwargs):
        completed: set[str] = set()
        for cls in iterate_classes(pkg):
            complete(cls, completed)

    def on_object(self, *, obj, **kwargs):
        if obj.docstring:
            obj.docstring.value = convert_docstring(obj.docstring.value)


def iterate_classes(module):
    for member in module.members.values():
        if not member.is_alias and member.is_class:
            yield member
        elif not member.is_alias and member.is_module:
            yield from iterate_classes(member)


def complete(cls, completed):
    """Completes the docstring of a class, as the decorator does when the class is defined.

    `completed`: the paths of the classes that are completed, each after its base class.
    """
    is_decorated = any(str(decorator.value) == "inherits_docstring" for decorator in cls.decorators)
    if not is_decorated or cls.path in completed:
        return
    completed.add(cls.path)
    complete(cls.resolved_bases[-1], completed)
    inherited = cls.resolved_bases[-1].docstring
    own = cls.docstring and cls.docstring.value
    names = [parameter.name for parameter in cls.parameters]
    text = complete_docstring(own, inherited.value, names)
    cls.docstring = griffe.Docstring(
        text, parent=cls, parser=inherited.parser, parser_options=inherited.parser_options
    )


def convert_docstring(docstring):
    text = docstring.replace("\nCall arguments:\n", "\nOther Parameters: Call arguments:\n") + "\n"
    text = SECTION.sub(lambda m: f"**{m[1]}:**\n\n{textwrap.dedent(m[2])}\n", text)
    return EXAMPLE.sub(lambda m: f"{m[1]}```pycon\n{m[0]}\n{m[1]}```", text).rstrip()
