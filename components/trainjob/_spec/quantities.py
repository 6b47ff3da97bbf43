"""Amounts of resources as Kubernetes writes them: ``4``, ``500m``, ``16Gi`` (``resource.Quantity`` of apimachinery)."""

from __future__ import annotations

import re
from fractions import Fraction

A_QUANTITY = "a Kubernetes quantity such as 4, 500m or 16Gi"

_DECIMAL = {"n": -3, "u": -2, "m": -1, "": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_BINARY = {"": 0, "Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:([EPTGM]i?|Ki|[kmun]?)|[eE]([+-]?[0-9]{1,2}))")
_LONGEST = 40  # characters: the largest is 2^63 - 1, with nine decimals
_OTHER_FORM = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgtp])i?b?|cores?|cpus?|gpus?)\s*", re.IGNORECASE)


def quantity_value(amount: str) -> Fraction | None:
    """The number that a quantity stands for: ``500m`` is 1/2, ``1Ki`` is 1024; None if the text is not a quantity."""
    found = _QUANTITY.fullmatch(amount) if len(amount) <= _LONGEST else None
    if found is None:
        return None
    number, suffix, exponent = Fraction(found[1]), found[2] or "", int(found[3] or 0)
    if suffix.endswith("i"):
        return number * Fraction(1024) ** _BINARY[suffix]
    return number * Fraction(1000) ** _DECIMAL[suffix] * Fraction(10) ** exponent


def canonical_quantity(amount: str) -> str:
    """A quantity as the API writes it: a whole number with the largest suffix, ``500m`` for ``0.5``.

    One with an exponent, which is rare, stays unchanged.
    """
    value = quantity_value(amount)
    if value is None or (amount[-1:].isdecimal() and "e" in amount.lower()):
        return amount
    binary = amount.endswith("i")
    suffixes, base = (_BINARY, 1024) if binary and value >= 1024 else (_DECIMAL, 1000)
    for name, power in sorted(suffixes.items(), key=lambda pair: -pair[1]):
        scaled = value / Fraction(base) ** power
        if value and scaled.denominator == 1:
            return f"{scaled}{name}"
    return "0" if not value else amount


def quantity_to_write(text: str) -> str:
    """What to write in place of an amount that people write, such as ``64GB``, ``64gb`` and ``4 cores``."""
    found = _OTHER_FORM.fullmatch(text)
    if found is None:
        return ""
    suffix = f"{found[2].upper()}i" if found[2] else ""
    return f"write {found[1]}{suffix}"
