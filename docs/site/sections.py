"""Griffe extension that adapts the docstrings of this package to mkdocstrings.

- Subclasses of classes with the mixin `InheritedDocstring` have the sections of their base class.
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
inherited_docstrings = runpy.run_path(str(PACKAGE / "inherited_docstrings.py"))
complete_docstring, HEADING = (inherited_docstrings[n] for n in ("complete_docstring", "HEADING"))


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
    """Completes the docstring of a class, as the mixin does when the class is defined.

    `completed`: the paths of the classes that are completed, each after its base class.
    """
    if not inherits_docstring(cls) or cls.path in completed:
        return
    completed.add(cls.path)
    complete(cls.resolved_bases[-1], completed)
    inherited = cls.resolved_bases[-1].docstring
    if inherited is None or not HEADING.search(inherited.value):
        return
    own = cls.docstring and cls.docstring.value
    names = [parameter.name for parameter in cls.parameters]
    text = complete_docstring(own, inherited.value, names, cls.name)
    cls.docstring = griffe.Docstring(
        text, parent=cls, parser=inherited.parser, parser_options=inherited.parser_options
    )


def inherits_docstring(cls):
    """Returns True if a base class of a class, but not the class itself, has the mixin."""
    bases = cls.resolved_bases
    if any(base.name == "InheritedDocstring" for base in bases):
        return False
    return any(has_mixin(base) for base in bases)


def has_mixin(cls):
    if cls.name == "InheritedDocstring":
        return True
    return cls.is_class and any(map(has_mixin, cls.resolved_bases))


def convert_docstring(docstring):
    text = docstring.replace("\nCall arguments:\n", "\nOther Parameters: Call arguments:\n") + "\n"
    text = SECTION.sub(lambda m: f"**{m[1]}:**\n\n{textwrap.dedent(m[2])}\n", text)
    return EXAMPLE.sub(lambda m: f"{m[1]}```pycon\n{m[0]}\n{m[1]}```", text).rstrip()
