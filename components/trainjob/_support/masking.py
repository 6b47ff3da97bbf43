"""Detects secrets: specs refuse them as literals, and stored or displayed text of a job masks them.

One table serves both. Its token patterns are those of detect-secrets 1.5.0 (Yelp) and gitleaks 8.30, named beside each.
Both are tools for repositories: the first needs requests and was last released in May 2024, the second is a Go program.
Their entropy rules are left out, since digests, commits and run ids have the same entropy as keys. Text without a known
pattern counts as a secret only by its context: ``NAME=value``, an option, a header.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from trainjob._support.control_characters import plain

MASK = "***"
"""Replaces a secret."""

# ---------------------------------------------------------------- secrets with a known pattern

_TOKENS = (
    r"(?:A3T[A-Z0-9]|ABIA|ACCA|AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])"  # detect-secrets: aws
    r"(?:[\s:;,|\"']{1,10}[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=]))?",  # with the secret key after it
    r"(?:gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{22,})",  # detect-secrets: github_token; gitleaks: github-*
    r"gl(?:pat|dt|ft|soat|rt|cbt|imt|ptt|agent|oas)-[\w-]{16,}",  # detect-secrets: gitlab_token
    r"(?:hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z]{34})",  # gitleaks: huggingface-access-token, -organization-api-token
    r"(?:xox[abeoprs]-[\w-]{10,}|xapp-\d-[\w-]{10,})",  # detect-secrets: slack; gitleaks: slack-app-token
    r"hooks\.slack\.com/services/T\w+/B\w+/\w+",  # detect-secrets: slack
    r"(?<![\w-])eyJ[\w-]{10,2000}\.eyJ[\w-]{10,}(?:\.[\w-]+)?",  # detect-secrets: jwt
    r"[\w~.]{3}\dQ~[\w~.-]{31,34}",  # gitleaks: azure-ad-client-secret
    r"(?:AIza[\w-]{35}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{28})",  # gitleaks: gcp-api-key; Google's OAuth
    r"sk-(?:[\w-]{0,100}T3BlbkFJ[\w-]{20,}|(?:proj|svcacct|admin|[a-z]{3}-[a-z]+\d\d)-[\w-]{20,})",  # hosted models
    r"(?:pypi-AgE[\w-]{50,}|npm_[A-Za-z0-9]{36}|dckr_pat_[\w-]{27})",  # detect-secrets: pypi_token, npm; Docker Hub
    r"(?:[rs]k_live_[0-9A-Za-z]{24,}|SG\.[\w-]{22}\.[\w-]{43})",  # detect-secrets: stripe, sendgrid
    r"(?:dapi[a-f0-9]{32}|hv[sb]\.[\w-]{20,}|dop_v1_[a-f0-9]{64}|gsk_[A-Za-z0-9]{52})",  # gitleaks: databricks, …
    r"(?:AKCp[A-Za-z0-9]{69}|cmVmd[A-Za-z0-9]{59}|LTAI[A-Za-z0-9]{20})(?![A-Za-z0-9])",  # gitleaks: artifactory-*, …
    r"AGE-SECRET-KEY-1[A-Z0-9]{58}",  # gitleaks: age-secret-key
)
_KNOWN = re.compile("(?<![A-Za-z0-9])(?:" + "|".join(_TOKENS) + ")")
_PRIVATE_KEY = re.compile(  # detect-secrets: private_key
    r"-----BEGIN[A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----[^-]*(?:-----END[A-Z0-9 ]*-----)?|PuTTY-User-Key-File-\d"
)
_KEY_BEGINS = re.compile(r"-----BEGIN[A-Z0-9 ]*PRIVATE KEY")
_KEY_ENDS = re.compile(r"-----END[A-Z0-9 ]*PRIVATE KEY")
_KEY_BODY = re.compile(r"(?:.*\s)?[A-Za-z0-9+/=]{16,76}|[A-Za-z0-9+/=]+|[A-Za-z-]+: .*|\s*")  # also after a label

# ---------------------------------------------------------------- secrets with a known context

_PLACED = re.compile(
    # detect-secrets: basic_auth; a password in a URL, also without a user (Redis), or a token in place of both
    r"://[^/\s:@\"'<>]*:(?P<url>[^/\s@\"'<>]+)@"
    r"|https?://(?P<user>[\w.~-]{20,})@(?!\w*\.?ingest|[\w.-]*sentry)"
    # signatures of URLs: SAS of Azure, AWS, Google, CloudFront
    r"|(?:[?&](?:sig|Signature)|X-(?:Amz|Goog|Oss)-Signature)=(?P<query>[\w%+/=.~-]{4,})"
    r"|(?<![\w-])(?:sig|Signature)=(?P<sig>[\w%+/=.~-]{16,})"
    # gitleaks: curl-auth-header, curl-auth-user
    r"|\b(?:Proxy-)?Authorization[\"']?\s*[:=]\s*[\"']?(?:Bearer|Basic|Token|Digest)\s+(?P<header>[^\s\"'$,{}<]{4,})"
    r"|\bBearer\s+(?P<bearer>[\w.~+/-]{16,}=*)"
    r"|\bcurl\b[^\n;|]{0,300}?\s(?:-u|--user|-U|--proxy-user)[ =]?[\"']?[^\s:\"'$]+:(?P<curl>[^\s\"'$]+)"
    r"|\bmachine\s+\S+\s+login\s+\S+\s+password\s+(?P<netrc>[^\s$]+)"
    r"|\bsshpass\s+-p\s*[\"']?(?P<ssh>[^\s\"'$]+)"
    r"|\b(?:docker|podman|nerdctl|crane|helm|oras)[^\n;|]{0,60}?\blogin\b[^\n;|]{0,200}?\s-p[ =]?[\"']?"
    r"(?P<login>[^\s\"'$]+)"
    r"|\bwandb\s+login\s+(?:--?\S+\s+){0,5}(?P<wandb>[0-9a-f]{40})"
    r"|\bmc\s+(?:alias|config\s+host)\s+\w+\s+\S+\s+\S+\s+\S+\s+[\"']?(?P<minio>[^\s\"'$]+)"
    r"|\baws_(?:secret_access_key|session_token)[ \t]+[\"']?(?P<aws>[^\s\"'$=:]{8,})"
    r"|[\"']auth[\"']\s*:\s*[\"'](?P<docker>[A-Za-z0-9+/=]{8,})[\"']",  # Docker's config.json
    re.IGNORECASE,
)

# ---------------------------------------------------------------- secrets with a known name

_SECRET_WORDS = {
    *("TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS", "APIKEY", "PASSCODE"),
}
_SECRET_ENDS = (  # of a word: PGPASSWORD
    *("PASSWORD", "PASSWD", "APIKEY", "SECRET", "SECRETKEY", "ACCESSKEY", "ACCOUNTKEY", "PRIVATEKEY"),
    *("AUTHTOKEN", "ACCESSTOKEN", "APITOKEN"),
)
_BEFORE_KEY = {
    *("API", "PRIVATE", "SECRET", "ACCESS", "ACCOUNT", "AUTH", "SERVICE", "MASTER", "ENCRYPTION", "SIGNING"),
}
_BEFORE_PASS = {
    *("DB", "DATABASE", "USER", "SMTP", "REDIS", "MYSQL", "PG", "POSTGRES", "KEY", "STORE"),
    *("ADMIN", "ROOT", "FTP"),
}
_BEFORE_TOKEN = {  # words before TOKEN if it means a token of a text
    *("PAD", "EOS", "BOS", "UNK", "SEP", "CLS", "MASK", "STOP", "SPECIAL", "NEXT"),
    *("PREVIOUS", "PREV", "START", "END", "BEGIN", "EOT", "EOD", "IMAGE", "AUDIO", "VIDEO"),
    *("VISION", "PER", "PROMPT", "TRIGGER", "PLACEHOLDER", "INITIALIZER", "DECODER", "FIRST", "LAST", "PREFIX"),
    *("SUFFIX", "MIDDLE", "UNEXPECTED", "INVALID", "EXPECTED", "UNKNOWN", "ILLEGAL", "BAD"),
}
_SWITCHES = {"USE", "USES", "NO", "WITH", "WITHOUT", "ENABLE", "DISABLE", "SKIP", "IGNORE", "ALLOW", "HAS", "IS", "ADD"}
_METADATA = {"FILE", "PATH", "DIR", "NAME", "ID", "URL", "URI", "TTL", "TYPE"}

_NO_SECRET = re.compile(
    r"\$\([^()]+\)|\$\{[^{}]+\}|\$\w+|\{\{.*\}\}|\{[\w.!:]*\}|%\(?\w*\)?s"  # references and templates
    r"|true|false|yes|no|on|off|none|null|nil|auto|\d{1,3}|-?\d+\.\d*(?:e-?\d+)?"  # HF_HUB_DISABLE_IMPLICIT_TOKEN=1
    r"|str|bytes|int|float|bool|object|string|any|optional"  # types, in code
    r"|<[^<>]{1,30}>|\[[A-Z]{1,10}\]|[^\w\s]{1,3}|\*+|•+|x{3,}"  # a tokenizer's special tokens; masked text
    r"|(?:arn|vault|ssm|sm|op|gcpsm|azurekeyvault|secretref|file|env):.+"  # references to a secret store
    r"|(?:~|\.{1,2})?(?:/[\w.@-]+){2,}/?|(?:~|\.{1,2})/[\w.@-]+"  # paths
    r"|[\w./~-]+\.(?:json|ya?ml|txt|pem|crt|key|env|cfg|ini|toml|token|p12|jks)",
    re.IGNORECASE | re.DOTALL,
)
_KEY_LIKE = re.compile(r"(?=.*\d)[\w+/-]{16,}={0,2}")
_AWS_SECRET_KEY = re.compile(r"[A-Za-z0-9/+]{40}")  # it may look like a path

_NAME = re.compile(
    r"""(?<![\w$%.])(?P<option>-{0,2})(?P<name>[A-Za-z_][\w.-]{0,80})"""
    r"""(?P<sign>\\?["']?\]?[ \t]{0,3}(?:=>|[=:](?![=:]))[ \t]{0,3}|(?<=\w)[ \t]{1,3})(?=\S)"""
)
_VALUE = re.compile(
    r"""(?P<quote>\\"|["'])(?P<quoted>(?:[^"'\\\n]|\\[^"\n]|(?!(?P=quote))["']){0,4000})(?P=quote)"""
    r"""|(?P<bare>[^\s"'`,;&|<>()\\]{1,4000})(?P<next>[ \t]{0,3}.?)"""
)
_HEADER = re.compile(r"[A-Z]+-[A-Z-]*(?:KEY|TOKEN)|APIKEY", re.IGNORECASE)
_PROSE = re.compile(  # words after a colon in a sentence
    r"a|an|the|is|are|was|were|has|had|holds|not|no|none|must|should|may|can|cannot|needs?|see|use|for|in|of|to|and|or|"
    r"it|this|that|expired|invalid|required|missing|failed|empty|unset|unknown|given|write|set|put|permission|access",
    re.IGNORECASE,
)
# Of an error: `token: unexpected status …`, `credentials: exec: …`. No token is a short word with another one after it.
_ERROR_OF = re.compile(r"(?:token|credentials?|secret)[\"']?: [A-Za-z]{1,16}\d{0,3}:? [\w\"'/]", re.IGNORECASE)
_WORD_BEFORE = re.compile(r"(\w+) $")
_IDENTIFIER = re.compile(r"[A-Za-z_][\w.]*")
_REFERENCES = re.compile(r"\$[({A-Za-z_]|^[{`%]|[\[{]|\.\*")  # also patterns, as of sed


def names_a_secret(name: str, value: str) -> bool:
    """Whether `name` is the name of a secret, and `value` may be one."""
    words = _words(name)
    if not value or not words or words[-1] in _METADATA or words[0] in _SWITCHES:
        return False
    before = words[-2] if len(words) > 1 else ""
    if words[-1] == "KEY":
        return before in _BEFORE_KEY and (not _NO_SECRET.fullmatch(value) or bool(_AWS_SECRET_KEY.fullmatch(value)))
    if words[-1] in ("PASS", "PWD"):
        named = before in _BEFORE_PASS
    else:
        named = words[-1] in _SECRET_WORDS or words[-1].endswith(_SECRET_ENDS)
        named = named and not (words[-1] == "TOKEN" and before in _BEFORE_TOKEN)
    return named and not _NO_SECRET.fullmatch(value)


def holds_secret(text: str) -> bool:
    """Whether `text`, a word of a command or any other text, contains a literal secret."""
    return next(_found(text, strict=True), None) is not None


def source_holds_secret(source: str) -> bool:
    """Whether Python `source` has a literal secret: assigned, passed or set under the name of a secret."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return holds_secret(source)
    constants = (
        node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return any(map(holds_secret, constants)) or any(
        names_a_secret(name, value) and _words(name)[-1:] != _words(value)[-1:] for name, value in _named_in(tree)
    )


def masked(text: str) -> str:
    """`text` with all secrets replaced by `MASK`."""
    position, parts = 0, []
    for start, end in sorted(_found(text, strict=False)):
        if start >= position:
            parts += [text[position:start], MASK]
        position = max(position, end)
    return "".join([*parts, text[position:]])


@lru_cache(maxsize=1024)
def public(text: str) -> str:
    """`text` of unknown origin, safe to store and display: without control sequences, and `masked`."""
    return masked(plain(text))


def masked_lines(lines: Iterable[str]) -> list[str]:
    """Consecutive lines, `masked`; a private key is masked up to its end, also if its begin is cut off."""
    given = [*lines]
    hidden: set[int] = set()
    begun = False
    for number, line in enumerate(given):
        if _KEY_ENDS.search(line):
            first = number
            while not begun and first > 0 and _KEY_BODY.fullmatch(given[first - 1]):
                first -= 1
            hidden |= {*range(first, number)} if not _KEY_BEGINS.search(line) else set()
            begun = False
        elif _KEY_BEGINS.search(line):
            begun = True
        elif begun := begun and bool(_KEY_BODY.fullmatch(line)):
            hidden.add(number)
    return [MASK if number in hidden else masked(line) for number, line in enumerate(given)]


def _found(text: str, *, strict: bool) -> Iterator[tuple[int, int]]:
    """Spans of the secrets.

    Args:
        text: Any text.
        strict: Leave out matches that may be prose or code: ``password: x``, a variable instead of a value.
    """
    for pattern in (_KNOWN, _PRIVATE_KEY):
        for found in pattern.finditer(text):
            yield found.span()
    for found in _PLACED.finditer(text):
        kind = str(found.lastgroup)
        if not _NO_SECRET.fullmatch(found[kind]) and not _REFERENCES.match(found[kind]):
            yield found.span(kind)
    position = 0
    while named := _NAME.search(text, position):
        position = named.end()
        given = _VALUE.match(text, position) if _announces_secret(named) else None
        if given is None:
            continue
        kind = "bare" if given["bare"] else "quoted"
        is_secret = _is_literal(named, given) if strict else _is_value(named, given)
        if is_secret and names_a_secret(named["name"], given[kind]):
            position = given.end(kind)
            yield given.span(kind)


def _announces_secret(found: re.Match[str]) -> bool:
    """Whether the name announces a secret; in `next token: …` it does not."""
    before = _WORD_BEFORE.search(found.string, max(0, found.start() - 20), found.start())
    return names_a_secret(found["name"], "any value") and not (before and before[1].upper() in _BEFORE_TOKEN)


def _is_value(found: re.Match[str], given: re.Match[str]) -> bool:
    """Whether the text after a name in a log is its value; after a blank alone, only for an option."""
    value = given["bare"] or given["quoted"]
    if not found["sign"].strip():
        return found["option"] == "--" and not value.startswith("-")
    called = given["bare"] and given["next"][:1] in ("(", "[")
    prose = _PROSE.fullmatch(value) or _ERROR_OF.match(found.string, found.start())
    return not (called or prose or _REFERENCES.search(value))


def _is_literal(found: re.Match[str], given: re.Match[str]) -> bool:
    """Whether the text after a name in a command is a literal, and neither prose nor a variable."""
    value, sign, after = given["bare"] or given["quoted"], found["sign"], (given["next"] or "").strip()[:1]
    if _REFERENCES.search(value) or (not sign.strip() and (found["option"] != "--" or value.startswith("-"))):
        return False
    if given["quote"] or not sign.strip():
        return True
    line = found.string[found.string.rfind("\n", 0, found.start()) + 1 : found.start()]
    alone = not line[:100].strip(" \t\"'-{") and after in ("", '"', "'", "}")
    if ":" in sign:
        return alone or bool(_HEADER.fullmatch(found["name"]))
    if alone and _KEY_LIKE.fullmatch(value):  # also `aws_secret_access_key = …` in a file
        return True
    before = found.string[max(0, found.start() - 1000) : found.start()].replace("$(", "")
    called = before.count("(") > before.count(")")  # `login(token=t, …)`
    named = _IDENTIFIER.fullmatch(value) and _words(value)[-1:] == _words(found["name"])[-1:]  # `token=hf_token`
    code = named or " " in sign or "\t" in sign or after in ("(", "[") or (called and after in (",", ")"))
    return not code


def _words(name: str) -> list[str]:
    """``dbPassword_2`` as ``["DB", "PASSWORD"]``."""
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    words = [word.rstrip("0123456789") for word in re.split(r"[^A-Za-z0-9]+", split)]
    return [word.upper() for word in words if word]


def _named_in(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Names and their literals in Python code."""
    for node in ast.walk(tree):
        pairs: list[tuple[str, ast.expr | None]] = []
        if isinstance(node, ast.Assign):
            pairs = [(_name_of(target), node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign):
            pairs = [(_name_of(node.target), node.value)]
        elif isinstance(node, ast.keyword):
            pairs = [(node.arg or "", node.value)]
        elif isinstance(node, ast.Dict):
            pairs = [(_text_of(key), value) for key, value in zip(node.keys, node.values, strict=True)]
        elif isinstance(node, ast.Call):  # os.environ.setdefault("HF_TOKEN", "…")
            pairs = [(_text_of(name), value) for name, value in zip(node.args, node.args[1:], strict=False)]
        elif isinstance(node, ast.arguments):
            named = [*node.posonlyargs, *node.args]
            pairs = [(arg.arg, value) for arg, value in zip(reversed(named), reversed(node.defaults), strict=False)]
            pairs += [(arg.arg, value) for arg, value in zip(node.kwonlyargs, node.kw_defaults, strict=True)]
        yield from ((name, _text_of(value)) for name, value in pairs if name and _text_of(value))


def _name_of(target: ast.expr) -> str:
    if isinstance(target, ast.Subscript):
        return _text_of(target.slice)
    return target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else ""


def _text_of(node: ast.expr | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
