"""Short forms, for error messages, of values and names from files, which may have any size."""

import reprlib

_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother, _short.maxlong = 4, 120, 120, 40
_short.maxlist = _short.maxtuple = _short.maxdict = 12


def short_repr(value):
    """Returns the `repr` of a value, shortened if it is long or nested deeply."""
    return _short.repr(value)


def abbreviate(names, limit=4):
    """Joins the first `limit` names or sentences and the number of further ones."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
