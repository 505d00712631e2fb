"""`Call arguments:` in docstrings of layers, as a list of its own beside that of the constructor."""

import griffe


class CallArguments(griffe.Extension):
    def on_object(self, *, obj, **kwargs):
        if obj.docstring:
            found = obj.docstring.value
            obj.docstring.value = found.replace(
                "\nCall arguments:\n", "\nOther Parameters: Call arguments:\n"
            )
