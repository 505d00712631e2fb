"""Script of the process that renders chat templates; `rendering.py` starts it.

It imports nothing of this package. It reads requests from standard input and writes replies to
standard output, one line of JSON each, after a first empty line.

    python worker.py '["folder of modules", …]'
"""

import contextlib
import datetime
import functools
import json
import sys

MAX_OUTPUT = 1_000_000  # bytes
MAX_MEMORY = 512 * 1024**2  # bytes of address space, of which Python and jinja2 use 40 MB
MAX_SECONDS = 10  # ends the process if its parent, which allows 2 seconds, is gone
MAX_MESSAGE = 500  # characters of an error that a template may choose


def make_environment():
    """Returns the jinja2 environment that transformers renders chat templates with."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}…{% endgeneration %}`: marks text of the assistant, is its content."""

        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
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


def render(compile_template, source, variables):
    """Returns `{"text": …}`, or `{"error": …}` with a message for the user."""
    chunks, size = [], 0
    try:
        for chunk in compile_template(source).generate(variables):
            size += len(chunk.encode("utf-8", "surrogatepass"))
            if size > MAX_OUTPUT:
                return {"error": "`chat_template` returned more than 1 MB of text."}
            chunks.append(chunk)
    except Rejection as error:
        return {"error": f"The chat template rejects the messages: {str(error)[:MAX_MESSAGE]}"}
    except MemoryError:
        return {"error": "`chat_template` used more than 512 MB of memory."}
    except Exception as error:
        name = type(error).__name__
        line = f" in line {error.lineno}" if hasattr(error, "lineno") else ""
        return {"error": f"`chat_template` failed with {name}{line}: {str(error)[:MAX_MESSAGE]}"}
    return {"text": "".join(chunks)}


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
    compile_template = functools.lru_cache(maxsize=8)(make_environment().from_string)
    alarm = limit_resources()
    print(flush=True)
    for line in sys.stdin:
        alarm(MAX_SECONDS)
        reply = json.dumps(render(compile_template, **json.loads(line)))
        alarm(0)
        print(reply, flush=True)


if __name__ == "__main__":
    sys.path[:] = json.loads(sys.argv[1])
    main()
