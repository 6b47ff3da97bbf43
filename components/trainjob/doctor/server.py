"""Whether a cluster can be reached: credentials, server, clocks."""

from __future__ import annotations

import re
import ssl
import time
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import anyio.to_thread

from trainjob.backends.kubernetes.client import ApiClient, Request
from trainjob.backends.kubernetes.credentials import Credentials
from trainjob.backends.kubernetes.errors import ApiError, Transient, Unauthorized
from trainjob.doctor.findings import Finding, Level
from trainjob.errors import ConfigurationError, TrainJobError
from trainjob.verdicts import RetryVerdict

_OLDEST = (1, 31)  # Kubernetes that Trainer 2.1 to 2.3 install on
_SKEW = 5.0  # seconds


async def reach(client: ApiClient, credentials: Credentials) -> tuple[bool, list[Finding]]:
    """Whether there is a server to ask anything else, and what is to be said about the way to it."""
    try:
        access = await anyio.to_thread.run_sync(credentials.load)
    except ConfigurationError as error:
        return False, [Finding("credentials", Level.FAILURE, str(error))]
    found = [Finding("credentials", Level.OK, credentials.source())]
    where = urlsplit(access.host)  # which may hold a password
    address = f"{where.scheme}://{where.hostname}" + (f":{where.port}" if where.port else "")
    try:
        version = str((await client.send(Request("GET", "/version"))).get("gitVersion"))
        began = time.monotonic()  # connected, so that it is the time of any further request
        await client.send(Request("GET", "/version"))
    except (ApiError, ConfigurationError) as error:
        return False, [*found, _unreached(error, address)]
    answered = f"{address} answers in {(time.monotonic() - began) * 1000:.0f} ms"
    if access.verify.verify_mode is ssl.CERT_NONE:
        message = f"{answered}, but its certificate is not verified, so that it can be anybody"
        found.append(Finding("server", Level.WARNING, message, "give the kubeconfig a certificate-authority"))
    else:
        found.append(Finding("server", Level.OK, f"{answered}, its certificate is trusted"))
    return True, [*found, _version(version)]


def _unreached(error: TrainJobError, address: str) -> Finding:
    if isinstance(error, ConfigurationError):
        advice = "the certificate-authority of the kubeconfig has to be the one that signed the server's certificate"
        return Finding("server", Level.FAILURE, str(error), advice)
    if isinstance(error, Unauthorized):
        return Finding("server", Level.FAILURE, f"{address}: {error.message}", "log in again, or renew the token")
    if isinstance(error, Transient):
        advice = f"see whether the API server is up and {address} can be reached from here (network, VPN, proxy)"
        return Finding("server", Level.FAILURE, str(error), advice, RetryVerdict.INFRASTRUCTURE)
    message = f"{address} does not answer as an API server does: {error}"
    return Finding("server", Level.FAILURE, message, "see whether the kubeconfig's server is one")


def _version(version: str) -> Finding:
    numbers = re.match(r"v?(\d+)\.(\d+)", version)
    if numbers is None:
        return Finding("kubernetes", Level.SKIPPED, f"its version cannot be read from {version!r}")
    if (int(numbers[1]), int(numbers[2])) >= _OLDEST:
        return Finding("kubernetes", Level.OK, version)
    needed = ".".join(map(str, _OLDEST))
    return Finding("kubernetes", Level.FAILURE, f"{version} is too old for Kubeflow Trainer", f"upgrade to {needed}")


async def clock(client: ApiClient) -> list[Finding]:
    """Whether this machine and the server agree about the time."""
    before = time.time()
    async with client.stream(Request("GET", "/version")) as response:
        date = response.headers.get("date")
    after = time.time()
    try:
        server = parsedate_to_datetime(str(date)).timestamp()
    except ValueError:
        return [Finding("clock", Level.SKIPPED, "the server's replies have no date")]
    # The header has whole seconds, so that the server's clock stood at it or up to a second later.
    skew = server - after if server > after else min(0.0, server + 1 - before)
    if abs(skew) <= _SKEW:
        return [Finding("clock", Level.OK, f"this machine and the server agree within {max(1, abs(skew)):.0f} s")]
    which = "behind" if skew > 0 else "ahead of"
    message = (
        f"this machine is {abs(skew):.0f} s {which} the server: --queue-timeout, --start-timeout and --run-timeout "
        "compare its clock with the job's timestamps"
    )
    return [Finding("clock", Level.WARNING, message, "have both clocks set by NTP (chrony, systemd-timesyncd)")]
