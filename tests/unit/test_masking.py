"""Detection of secrets, which are rejected in a spec and masked in a log."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from trainjob._support.masking import (
    MASK,
    holds_secret,
    masked,
    masked_lines,
    names_a_secret,
    public,
    source_holds_secret,
)

SAMPLES = Path(__file__).parent / "secrets"
LITERALS = (SAMPLES / "literals.txt").read_text().splitlines()
"""Valid forms of tokens and passwords, but not real ones."""
COMMANDS = (SAMPLES / "commands.txt").read_text().splitlines()
"""Common commands without secrets."""
FILES = [
    "cat > c.yaml <<E\npassword: hunter2\nE",
    "cat > ~/.aws/credentials <<E\n[default]\naws_secret_access_key = a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2\nE",
]


@pytest.mark.parametrize("text", [*LITERALS, *FILES])
def test_a_literal_is_found_and_masked(text: str) -> None:
    assert holds_secret(text)
    shown = masked(text)
    assert MASK in shown
    assert "hunter2" not in shown
    assert "a1B2a1B2" not in shown
    assert masked(shown) == shown


@pytest.mark.parametrize("text", COMMANDS)
def test_a_command_without_a_secret_passes(text: str) -> None:
    assert not holds_secret(text)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("Password = 'hunter 2'", f"Password = '{MASK}'"),
        ('{"api_key":"abc", "epoch": 3}', f'{{"api_key":"{MASK}", "epoch": 3}}'),
        ("key AKIAIOSFODNN7EXAMPLE wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", f"key {MASK}"),
        ("GET /x?sig=a1B2a1B2a1B2a1B2%3D&se=2026 403", f"GET /x?sig={MASK}&se=2026 403"),
        ("Authorization: Bearer abcd1234", f"Authorization: Bearer {MASK}"),
        ("password: hunter for user me", f"password: {MASK} for user me"),
        ("token: hunter", f"token: {MASK}"),
        ("token: a1B2a1B2 for me", f"token: {MASK} for me"),
        ("HF_TOKEN: hunter for me", f"HF_TOKEN: {MASK} for me"),
        ("a='-----BEGIN PRIVATE KEY-----\\nMIIE\\n-----END PRIVATE KEY-----'", f"a='{MASK}'"),
    ],
)
def test_only_the_secret_of_a_line_is_masked(line: str, shown: str) -> None:
    assert masked(line) == shown


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: invalid token: '<' at line 1",
        "SyntaxError: unexpected token: foo",
        "KeyError: 'token'",
        "loss per token: 0.34, next token: 50256, tokens: 512",
        "error: token expired; secret: not found",
        "failed to fetch anonymous token: unexpected status from GET request to https://host/token: 429 Too Many",
        'failed to fetch anonymous token: Get "https://host/token": dial tcp: lookup host: no such host',
        "failed to fetch oauth token: denied: requested access to the resource is denied",
        "failed to fetch oauth token: unexpected EOF",
        "cannot refresh token: x509: certificate signed by unknown authority",
        "getting credentials: exec: executable aws not found",
        "env.HF_TOKEN: is a literal secret (write HF_TOKEN: {'valueFrom': {'secretKeyRef': {'name': …}}})",
    ],
)
def test_errors_in_logs_are_not_masked(line: str) -> None:
    assert masked(line) == line


def test_a_private_key_of_several_lines_is_masked() -> None:
    body = ["MIIEpAIBAAKCAQEA0Z3VS5JJcds3xfn", "abc="]
    key = ["-----BEGIN RSA PRIVATE KEY-----", *body, "-----END RSA PRIVATE KEY-----"]
    assert masked_lines(["a", *key, "b"]) == ["a", MASK, MASK, MASK, "-----END RSA PRIVATE KEY-----", "b"]
    assert masked_lines([*key[1:], "b"]) == [MASK, MASK, "-----END RSA PRIVATE KEY-----", "b"]
    error = ["Traceback (most recent call last):", "x" * 30]
    assert masked_lines([*key[:2], *error]) == [MASK, MASK, *error]


@pytest.mark.parametrize(
    "source",
    [
        'login(token="abc123")',
        'os.environ["HF_TOKEN"] = "abc"',
        'os.environ.setdefault("HF_TOKEN", "abc123")',
        'config = {"password": "hunter2"}',
        'def train(api_key="abc123"): pass',
        'def train(*, api_key: str = "abc123"): pass',
        'self.password: str = "hunter2"',
        'os.system("mysql --password=hunter2")',
        'no python password="hunter2"',
    ],
)
def test_a_literal_in_code_is_found(source: str) -> None:
    assert source_holds_secret(source)


def test_code_without_a_secret_passes() -> None:
    assert not source_holds_secret(
        """
def train(token: str, api_key: str = "", *, password=None):
    login(token=token, add_to_git_credential=False)
    password = os.environ["PASSWORD"]
    secret = config["secret"]
    tokenizer.pad_token = "<pad>"
    tokenizer.add_special_tokens({"pad_token": "[PAD]", "bos_token": "begin"})
    batch = {"token": token, "Authorization": f"Bearer {token}"}
    TOKEN = "token"
    path = "s3://bucket/token/password"
"""
    )


SECRETS = ["accessToken", "PGPASSWORD", "MYSQL_PWD", "HF_TOKEN_2", "db.password", "AccountKey", "WANDB_API_KEY"]
OTHERS = {"GOOGLE_APPLICATION_CREDENTIALS": "/secrets/key.json", "PAD_TOKEN": "!", "PWD": "/work", "USE_TOKEN": "x"}
OTHERS |= {"PASSWORD_FILE": "/y", "SORT_KEY": "name", "MONKEY": "x", "TURNKEY": "y"}


def test_names_of_secrets_are_recognized() -> None:
    assert [name for name in SECRETS if not names_a_secret(name, "x")] == []
    assert [name for name, value in OTHERS.items() if names_a_secret(name, value)] == [], "similar names"


def test_a_control_sequence_hides_no_secret() -> None:
    assert public("pass\x1b[0mword=hunter2") == f"password={MASK}"


@given(st.text() | st.lists(st.sampled_from([*"'\"=: -$({", "token", "password", "://", "-----BEGIN"])).map("".join))
def test_any_text_can_be_masked_twice(text: str) -> None:
    shown = masked(text)
    assert masked(shown) == masked(masked(shown))
    holds_secret(text)
    source_holds_secret(text)


def test_masking_takes_linear_time() -> None:
    parts = ("x=", "token ", "curl ", "docker login ", "sk-", "eyJa-", 'token="', "machine a ", "token=$", "://", '"')
    for part in parts:
        text = part * (20_000 // len(part))
        masked(text)  # quadratic time would take seconds each
        holds_secret(text)
