"""Tool calls in generated text, parsed while it is generated."""

import uuid
from typing import Any

from keras_recurrent.chat.tools import MALFORMED, parse_calls
from keras_recurrent.generation.text import StopFilter


class ToolCallParser:
    """Separates the calls in an answer from its content, while it is generated.

    Args:
        marks: the `ToolFormat` of the model.
        tools: a list that `check_tools` accepts.
        max_calls: integer, the number of calls after which further calls are dropped. None: no
            limit.

    Attributes:
        calls: a list of pairs of a name and a dictionary of arguments, the calls so far.
    """

    def __init__(self, marks, tools, max_calls=None):
        self._marks, self._max_calls = marks, max_calls
        functions = [tool["function"] for tool in tools]
        self._parameters = {each["name"]: each.get("parameters") or {} for each in functions}
        self._filter, self._space = StopFilter([marks.begin]), ""
        self._body: str | None = None  # text after `begin`, until `end`
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def add(self, text, is_last=False):
        """Adds text of the answer; returns the content that may be shown.

        White space before and after calls is not shown. Text between marks that is not a list of
        calls is content.
        """
        content = ""
        while text or is_last:
            if self._body is None:
                shown, has_begun = self._filter.add(text, is_last)
                content += self._strip(shown)
                if not has_begun:
                    break
                text, self._body = self._filter.held[len(self._marks.begin) :], ""
                self._filter = StopFilter([self._marks.begin])
            body, end, text = (self._body + text).partition(self._marks.end)
            self._body = body
            if not end and not is_last:
                break
            content += self._end_calls(body, end)
            self._body = None
            if not text:
                break
        return content + self._space if is_last and not self.calls else content

    def _end_calls(self, body, end):
        """Adds the calls of a text. Returns the text with its marks if it is malformed, else ""."""
        try:
            self.calls += parse_calls(body, self._parameters)
        except MALFORMED:
            return self._strip(self._marks.begin + body + end)
        self._space = ""
        del self.calls[self._max_calls or len(self.calls) :]
        return ""

    def _strip(self, text):
        """Returns content without the white space at its end, which is withheld."""
        text = self._space + text
        content = text.rstrip()
        self._space = text[len(content) :]
        return content


def tool_call(name, arguments):
    """Returns a call in the form of `tool_calls` in messages."""
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
