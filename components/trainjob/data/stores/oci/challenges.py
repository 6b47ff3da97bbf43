"""Parse ``WWW-Authenticate`` (RFC 9110, 11.6.1), as registries send it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_WORD = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_PARAMETER = re.compile(rf'\s*({_WORD})\s*=\s*(?:"((?:[^"\\]|\\.)*)"|({_WORD}))\s*')
_SCHEME = re.compile(rf"\s*({_WORD})(?=\s|,|$)")
_TOKEN68 = re.compile(r"\s*[A-Za-z0-9._~+/-]+=*\s*(?=,|$)")


@dataclass(frozen=True)
class Challenge:
    """One authentication scheme that a server offers; scheme and parameter names in lower case."""

    scheme: str
    parameters: dict[str, str] = field(default_factory=dict)


def parse(header: str) -> list[Challenge]:
    """The challenges of a header, in their order. The list ends at the first invalid one; nothing is raised."""
    found: list[Challenge] = []
    at = 0
    while at < len(header):
        if header[at] in ", \t":
            at += 1
        elif found and (match := _PARAMETER.match(header, at)):
            quoted = match[2]
            value = match[3] if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
            found[-1].parameters.setdefault(match[1].lower(), value)
            at = match.end()
        elif match := _SCHEME.match(header, at):
            found.append(Challenge(match[1].lower()))
            at = match.end()
        elif match := _TOKEN68.match(header, at):
            at = match.end()
        else:
            break
    return found
