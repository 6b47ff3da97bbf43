"""The connection to a cluster: credentials, server, clocks."""

from __future__ import annotations

import re
import ssl
import time
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import anyio.to_thread

from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.client import ApiClient, Request
from trainjob._backends.kubernetes.errors import ApiError, Transient, Unauthorized
from trainjob._doctor.findings import Finding, Level
from trainjob.errors import ConfigurationError, RetryVerdict, TrainJobError

_OLDEST = (1, 31)  # Kubernetes version that Trainer 2.1 to 2.3 require
_SKEW = 5.0  # seconds


async def reach(client: ApiClient, credentials: Credentials) -> tuple[bool, list[Finding]]:
    """Whether the API server answers, and the findings about credentials, connection and version."""
    try:
        access = await anyio.to_thread.run_sync(credentials.load)
    except ConfigurationError as error:
        return False, [Finding("credentials", Level.FAILURE, str(error))]
    found = [Finding("credentials", Level.OK, credentials.source())]
    where = urlsplit(access.host)  # the URL may contain a password
    address = f"{where.scheme}://{where.hostname}" + (f":{where.port}" if where.port else "")
    try:
        version = str((await client.send(Request("GET", "/version"))).get("gitVersion"))
        began = time.monotonic()  # the connection is open by now: the time of any further request
        await client.send(Request("GET", "/version"))
    except (ApiError, ConfigurationError) as error:
        return False, [*found, _connection_failure(error, address)]
    answered = f"{address} answers in {(time.monotonic() - began) * 1000:.0f} ms"
    if access.verify.verify_mode is ssl.CERT_NONE:
        message = f"{answered}, but its certificate is not verified: another server can impersonate it"
        found.append(Finding("server", Level.WARNING, message, "set certificate-authority in the kubeconfig"))
    else:
        found.append(Finding("server", Level.OK, f"{answered}, its certificate is trusted"))
    return True, [*found, _version(version)]


def _connection_failure(error: TrainJobError, address: str) -> Finding:
    if isinstance(error, ConfigurationError):
        advice = "set certificate-authority in the kubeconfig to the CA that signed the certificate of the server"
        return Finding("server", Level.FAILURE, str(error), advice)
    if isinstance(error, Unauthorized):
        return Finding("server", Level.FAILURE, f"{address}: {error.message}", "log in again, or renew the token")
    if isinstance(error, Transient):
        advice = (
            f"check that the API server runs and that {address} is reachable from this machine (network, VPN, proxy)"
        )
        return Finding("server", Level.FAILURE, str(error), advice, RetryVerdict.INFRASTRUCTURE)
    message = f"{address} does not answer like an API server: {error}"
    return Finding("server", Level.FAILURE, message, "check the server in the kubeconfig")


def _version(version: str) -> Finding:
    numbers = re.match(r"v?(\d+)\.(\d+)", version)
    if numbers is None:
        return Finding("kubernetes", Level.SKIPPED, f"version {version!r} cannot be parsed")
    if (int(numbers[1]), int(numbers[2])) >= _OLDEST:
        return Finding("kubernetes", Level.OK, version)
    needed = ".".join(map(str, _OLDEST))
    return Finding(
        "kubernetes",
        Level.FAILURE,
        f"{version} is too old for Kubeflow Trainer",
        f"upgrade Kubernetes to {needed} or newer",
    )


async def clock(client: ApiClient) -> list[Finding]:
    """Whether the clocks of this machine and the server agree."""
    before = time.time()
    async with client.stream(Request("GET", "/version")) as response:
        date = response.headers.get("date")
    after = time.time()
    try:
        server = parsedate_to_datetime(str(date)).timestamp()
    except ValueError:
        return [Finding("clock", Level.SKIPPED, "the replies of the server have no Date header")]
    # The header has whole seconds: the clock of the server was at this value or up to a second later.
    skew = server - after if server > after else min(0.0, server + 1 - before)
    if abs(skew) <= _SKEW:
        return [Finding("clock", Level.OK, f"this machine and the server agree within {max(1, abs(skew)):.0f} s")]
    which = "behind" if skew > 0 else "ahead of"
    message = (
        f"this machine is {abs(skew):.0f} s {which} the server: certificates and tokens may count as expired or not "
        "yet valid, and its log lines have other times; timeouts of jobs count by the server's clock"
    )
    return [Finding("clock", Level.WARNING, message, "synchronize both clocks by NTP (chrony, systemd-timesyncd)")]
