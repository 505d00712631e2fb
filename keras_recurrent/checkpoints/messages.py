"""What stands in errors of values and names from files, which may be of any size."""

import reprlib

_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother, _short.maxlong = 4, 120, 120, 40
_short.maxlist = _short.maxtuple = _short.maxdict = 12


def shown(value):
    """The `repr` of a value, cut where it is long or nested deeply."""
    return _short.repr(value)


def listed(names, limit=4):
    """The first few of a list of names or sentences, and how many more there are."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
