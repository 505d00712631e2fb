"""Docstrings of classes, completed by the docstrings of their base classes.

docs/site/sections.py loads this file without the package, so it imports only the standard library.
"""

import inspect
import re

SECTIONS = ("", "Args", "Sublayers", "Call arguments", "Returns", "Raises", "Example")
HEADING = re.compile(rf"^({'|'.join(SECTIONS[1:])}):", re.MULTILINE)
ENTRY = re.compile(r"\n(?= {4}\S)")
TASK = re.compile(r"(\w+?)(CausalLM|TextClassifier)(Preprocessor)?")
# Presets of other families in the place of Griffin's `hawk_tiny`.
TINY_PRESETS = {"HGRN2": "hgrn2_tiny", "LFM2": "lfm2_tiny", "LightningHybrid": "hypenet_tiny"}
TINY_PRESETS |= {"MambaHybrid": "nemotron_h_tiny", "TransNormer": "tnl_tiny"}


class InheritedDocstring:
    """Mixin of base classes: completes docstrings of subclasses from their last base class."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        inherited = inspect.cleandoc(cls.__bases__[-1].__doc__ or "")
        if InheritedDocstring not in cls.__bases__ and HEADING.search(inherited):
            parameters = list(inspect.signature(cls.__init__).parameters)
            cls.__doc__ = complete_docstring(cls.__doc__, inherited, parameters, cls.__name__)


def complete_docstring(docstring, inherited, parameters, name):
    """Returns a docstring with the missing sections and arguments of another one.

    A section replaces the section of `inherited` with the same heading; the text before the first
    heading is a section, too. In `Args` and `Call arguments`, entries are replaced one by one, and
    text after the entries is kept. Errors are added to those of `inherited`. If `name` is the name
    of a task, its family and a preset of it replace Griffin's in `inherited`.

    Args:
        docstring: string, or None.
        inherited: string, the docstring of the base class.
        parameters: list of strings, the names of the parameters of the constructor, in order.
            Entries of the `Args` of `inherited` that are not in `parameters` are dropped, unless
            it has `kwargs`.
        name: string, the name of the class.
    """
    task = TASK.fullmatch(name)
    if task and task[1] in TINY_PRESETS:
        inherited = inherited.replace("Griffin", task[1])
        inherited = inherited.replace("hawk_tiny", TINY_PRESETS[task[1]])
    own, base = _sections(docstring), _sections(inherited)
    merged = base | own
    if "Args" in base:
        taken = None if "kwargs" in parameters else parameters
        merged["Args"] = _merge_entries(own.get("Args", ""), base["Args"], parameters, taken)
    if "Call arguments" in base:
        mine, theirs = own.get("Call arguments", ""), base["Call arguments"]
        merged["Call arguments"] = _merge_entries(mine, theirs, ["inputs", *_entries(mine)])
    if "Raises" in base and "Raises" in own:
        merged["Raises"] = own["Raises"] + base["Raises"].removeprefix("Raises:")
    return "\n\n".join(merged[name] for name in SECTIONS if name in merged)


def _sections(docstring):
    """Returns `{heading: text with its heading}`."""
    text, *parts = HEADING.split(inspect.cleandoc(docstring or ""))
    sections = {"": text, **dict(zip(parts[::2], parts[1::2], strict=True))}
    headings = {name: f"{name}:{text}" if name else text for name, text in sections.items()}
    return {name: text.strip() for name, text in headings.items() if text}


def _merge_entries(own, base, order, taken=None):
    """Merges two sections.

    Args:
        own, base: strings. Entries of `own` replace those of `base`.
        order: list of strings, the names of the first entries. Others follow before `kwargs`.
        taken: list of strings, the names of the entries of `base` to keep. None: all.
    """
    own, _, own_text = own.partition("\n\n")
    base, _, base_text = base.partition("\n\n")
    entries = _entries(base)
    heading = base.partition("\n")[0]
    entries = {n: e for n, e in entries.items() if taken is None or n in taken} | _entries(own)
    first = [name for name in order if name in entries and name != "kwargs"]
    others = [name for name in entries if name not in (*first, "kwargs")]
    names = first + others + [name for name in ("kwargs",) if name in entries]
    section = "\n".join([heading, *(entries[name] for name in names)])
    return "\n\n".join(filter(None, [section, base_text, own_text]))


def _entries(section):
    """Returns `{first name: entry}` of the arguments of a section."""
    entries = ENTRY.split(section)[1:]
    return {re.split(r"\W", entry.lstrip(" *"), maxsplit=1)[0]: entry for entry in entries}
