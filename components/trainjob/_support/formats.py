"""The check of the number that each stored format has. It is raised when an older reader would misread the format."""

from __future__ import annotations


def wrong_format(what: str, found: object, known: int) -> str:
    """Why `what` must not be read, as a message; empty if it has the known format.

    Args:
        what: The file or the object, with its location.
        found: Its number, as read.
        known: The number of the format that the reader supports.
    """
    if type(found) is not int:  # `True == 1`
        return f"{what} has no number of its format (this trainjob reads {known})"
    if found > known:
        return f"{what} was written by a newer trainjob (format {found}; this one reads {known}): upgrade trainjob"
    return "" if found == known else f"{what} has the unknown format {found} (this trainjob reads {known})"
