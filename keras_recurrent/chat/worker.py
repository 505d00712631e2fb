"""Script of the process that renders chat templates; `rendering.py` starts it.

It imports nothing of this package. It reads requests from standard input and writes replies to
standard output, one line of JSON each, after a first empty line.

Special tokens may come only from the template, so `TemplateText` records which characters the
template wrote. String operations are applied to the text, and again to a copy with these characters
replaced by private ones. Where the two results differ, all characters count as those of messages.

    python worker.py '["folder of modules", …]'
"""

import contextlib
import datetime
import functools
import itertools
import json
import re
import sys
import traceback
import types
from typing import Any

MAX_OUTPUT = 1_000_000  # bytes
MAX_MEMORY = 512 * 1024**2  # bytes of address space, of which Python and jinja2 use 40 MB
MAX_SECONDS = 10  # ends the process if its parent, which allows 2 seconds, is gone
MAX_MESSAGE = 500  # characters of an error that a template may choose

CASES = {"capitalize", "casefold", "lower", "swapcase", "title", "upper"}
SOURCES = "<template>", "<unknown>"  # names of templates in jinja2's tracebacks
OTHER = "\x7f"  # in the place of characters that the template did not write
# White space and directives of format strings, on which functions of strings depend.
UNMARKED = re.compile(r"(\s+|%(?:\(\w*\))?[-#0 +.\d]*[a-zA-Z]|\{\w*\})")


class TemplateText(str):
    """Text with `_marked`, its copy with private characters for those that the template wrote."""

    _marked: str

    def __new__(cls, text, marked=None):
        made = super().__new__(cls, text)
        made._marked = str.__getitem__(made, slice(None)) if marked is None else marked
        return made

    def __str__(self):
        return self

    def __getitem__(self, key):
        return TemplateText(super().__getitem__(key), self._marked[key])


class Marks:
    """Private characters of one rendering, none of which is in a message.

    Args:
        used: set of the characters in messages.
        is_recorded: boolean. False: the template counts as text of messages, which takes less time.
    """

    def __init__(self, used, is_recorded):
        self._used = used
        private = map(chr, itertools.chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE)))
        self._free = (character for character in private if character not in self._used)
        self._mark = functools.cache(self._new_mark)
        self._characters = {}  # `{code of a mark: character}`
        self.literal = functools.cache(self._mark_text) if is_recorded else str

    def _mark_text(self, text):
        """Returns text that the template wrote as a `TemplateText`."""
        parts = UNMARKED.split(text)
        parts[::2] = ("".join(map(self._mark, part)) for part in parts[::2])
        return TemplateText(text, "".join(parts))

    def _new_mark(self, character):
        mark = next(self._free)
        self._characters[ord(mark)] = character
        return mark

    def join(self, texts):
        """Returns texts as one text, with the origin of its characters unless it is too long."""
        texts = list(map(str, texts))
        text = "".join(texts)
        if len(text) > MAX_OUTPUT or TemplateText not in map(type, texts):
            return text
        return TemplateText(text, "".join(map(self._copy, texts)))

    def _copy(self, text):
        if isinstance(text, TemplateText) or text.isascii():
            return _marked(text)
        # A function such as `striptags`, which decodes entities, may have made private characters.
        self._used.update(text)
        return text.translate(dict.fromkeys(self._characters, OTHER))

    def trace(self, function, *args, **kwargs):
        """Calls a function; returns a string as a `TemplateText` if the origin is certain."""
        given = [list(a) if isinstance(a, types.GeneratorType) else a for a in args]
        result = function(*given, **kwargs)
        copies = [_marked(arg) for arg in given]
        is_text = type(result) in (str, TemplateText) and len(result) <= MAX_OUTPUT
        if not is_text or copies == given:
            return result
        # `replace` finds text of messages only by arguments that are not marked.
        strings = [i for i, arg in enumerate(given) if isinstance(arg, str)]
        for plain in ([], strings[1:2]):
            arguments = [given[i] if i in plain else copy for i, copy in enumerate(copies)]
            with contextlib.suppress(LookupError, TypeError, ValueError):
                marked = function(*arguments, **_marked(kwargs))
                if marked.translate(self._characters) == result:
                    if not result.isascii():
                        self._used.update(result)
                    return TemplateText(result, marked)
        text, is_case = given[0], getattr(function, "__name__", "").removeprefix("do_") in CASES
        if is_case and isinstance(text, TemplateText) and len(text) == len(result):
            pairs = zip(text._marked, result, strict=True)  # marks have no upper and lower case
            marks = (self._mark(c) if ord(mark) in self._characters else c for mark, c in pairs)
            return TemplateText(result, "".join(marks))
        return result

    def template_text(self, text):
        """Returns `text` with `OTHER` for each character that the template did not write."""
        if not isinstance(text, TemplateText):
            return OTHER * len(text)
        # White space is not marked; a special token may have some.
        origins = {ord(c): c if c.isspace() else OTHER for c in set(text._marked)}
        return text._marked.translate(origins | self._characters)


def _marked(value):
    """Returns the marked copies of texts in nested lists and dictionaries."""
    if isinstance(value, TemplateText):
        return value._marked
    if type(value) in (list, tuple):
        return type(value)(map(_marked, value))
    if type(value) is dict:
        return {key: _marked(item) for key, item in value.items()}
    return value


def make_environment():
    """Returns the jinja2 environment that transformers renders chat templates with."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox
    import jinja2.visitor
    from jinja2 import nodes

    class Generation(jinja2.ext.Extension):
        """`{% generation %}…{% endgeneration %}`: marks text of the assistant, is its content."""

        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Literals(jinja2.visitor.NodeTransformer):
        """Marks text of the template, and joins texts by a filter, which is traced."""

        def visit_Const(self, node):
            is_text = isinstance(node.value, str)
            return nodes.Filter(node, " literal", [], [], None, None) if is_text else node

        def visit_TemplateData(self, node):
            return self.visit_Const(nodes.Const(node.data))

        def visit_Concat(self, node):
            self.generic_visit(node)
            return nodes.Filter(nodes.List(node.nodes), " concat", [], [], None, None)

    class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
        """Records the origin of characters; `marks` are those of the current rendering."""

        intercepted_binops = frozenset({"+", "*", "%"})
        marks: Any

        def _parse(self, *args):
            tree = Literals().visit(super()._parse(*args))
            return tree.set_environment(self)

        def trace(self, function, *args, **kwargs):
            return self.marks.trace(function, *args, **kwargs)

        def concat(self, parts):
            return self.marks.join(parts)

        def call_binop(self, context, operator, left, right):
            if operator == "+" and {type(left), type(right)} <= {str, TemplateText}:
                return self.marks.join([left, right])
            return self.trace(self.binop_table[operator], left, right)

        def call(self, __context, __function, *args, **kwargs):
            owner = getattr(getattr(__function, "__wrapped__", __function), "__self__", None)
            if not isinstance(owner, str):
                return super().call(__context, __function, *args, **kwargs)

            def method(text, *args, **kwargs):
                return super(Sandbox, self).call(
                    __context, self.getattr(text, __function.__name__), *args, **kwargs
                )

            method.__name__ = __function.__name__
            return self.trace(method, owner, *args, **kwargs)

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.filters["safe"] = lambda text: text  # texts are not escaped
    for name, filter in environment.filters.items():
        traced = functools.partial(environment.trace, filter)
        environment.filters[name] = functools.update_wrapper(traced, filter)
    # A filter of the context is not evaluated at compilation. Templates cannot write these names.
    context_filter = jinja2.pass_context
    environment.filters[" literal"] = context_filter(
        lambda _, text: environment.marks.literal(text)
    )
    environment.filters[" concat"] = context_filter(lambda _, texts: environment.marks.join(texts))
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


class Rejection(Exception):
    """Raised by a template that calls `raise_exception`."""


def raise_exception(message):
    raise Rejection(message)


def strftime_now(format):
    return datetime.datetime.now().strftime(format)


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """Filter `tojson`. Unlike jinja2's, it escapes neither HTML nor letters outside ASCII."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def render(environment, compile_template, source, variables, ends, calls):
    """Returns `{"texts": …, "template_text": …}`, or `{"error": …}` with a message for the user.

    `template_text` belongs to the last text. Strings in `variables`, the roles of messages and the
    marks of `calls` count as text of the template.
    """
    used, texts = set(json.dumps(variables, ensure_ascii=False)), []
    try:
        template = compile_template(source)
        for number, (end, add_generation_prompt) in enumerate(ends, 1):
            marks = environment.marks = Marks(used, is_recorded=number == len(ends))
            given: Any = {
                k: marks.literal(v) if type(v) is str else v for k, v in variables.items()
            }
            given["add_generation_prompt"] = add_generation_prompt
            given["messages"] = [
                {**message, "role": marks.literal(message["role"])}
                for message in variables["messages"][:end]
            ]
            for index, begin, text, close in calls:
                for message in given["messages"][index : index + 1]:
                    marked = marks.literal(begin), text, marks.literal(close)
                    message["content"] = marks.join([message["content"], *marked])
            chunks, size = [], 0
            for chunk in template.generate(given):
                size += len(chunk.encode("utf-8", "surrogatepass"))
                if size > MAX_OUTPUT:
                    return {"error": "`chat_template` returned more than 1 MB of text."}
                chunks.append(chunk)
            texts.append("".join(chunks))
    except Rejection as error:
        message = f"The chat template rejects the messages: {str(error)[:MAX_MESSAGE]}"
        return {"error": message, "is_rejection": True}
    except MemoryError:
        return {"error": "`chat_template` used more than 512 MB of memory."}
    except Exception as error:
        name = type(error).__name__
        frames = traceback.walk_tb(error.__traceback__)
        lines = [line for frame, line in frames if frame.f_code.co_filename in SOURCES]
        line = f" in line {lines[-1]}" if lines else ""
        return {"error": f"`chat_template` failed with {name}{line}: {str(error)[:MAX_MESSAGE]}"}
    return {"texts": texts, "template_text": "".join(map(marks.template_text, chunks))}


def limit_resources():
    """Limits the memory, where the system can, and ignores the Ctrl-C that is for the parent."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        import resource
    except ImportError:  # Windows
        return lambda seconds: None
    with contextlib.suppress(ValueError, OSError):  # macOS
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    return signal.alarm  # ends the process after some seconds, also inside one operation


def main():
    environment = make_environment()
    compile_template = functools.lru_cache(maxsize=8)(environment.from_string)
    alarm = limit_resources()
    print(flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        alarm(MAX_SECONDS * len(request["ends"]))
        reply = json.dumps(render(environment, compile_template, **request))
        alarm(0)
        print(reply, flush=True)


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])
    main()
