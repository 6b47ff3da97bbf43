"""``trainjob report`` and ``trainjob ui``: the pages of jobs, as a file and served on this machine."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import click

from trainjob import names
from trainjob._manifest.workflow_labels import latest_attempts, run_labels, selectors, title_of
from trainjob._pages.live import take_document
from trainjob._pages.page import page_html
from trainjob._pages.server import Server
from trainjob._pages.shared_documents import LINES, compared
from trainjob._pages.study import document_of_study, find_study
from trainjob._support.control_characters import one_line
from trainjob._support.kube_objects import mapping
from trainjob._support.signals import handled
from trainjob.cli import completion
from trainjob.cli.command import command
from trainjob.cli.exits import EXIT_CODES
from trainjob.cli.options import output_file, page_file
from trainjob.cli.output import OutputClosed, echo
from trainjob.cli.session import Session
from trainjob.client import TrainJobClient
from trainjob.errors import ConfigurationError, NotFound, TrainJobError
from trainjob.job import KEY, MANAGED_BY, key_hash, labels_of

if TYPE_CHECKING:
    from trainjob._backends.base import TrainJob

_SHOWN = 200  # characters of WHAT, or of a title, in a message
_CHOICES = 20  # workflows that a message lists
_FIRST_READ_SECONDS = 5.0


# ---------------------------------------------------------------- report


@command(
    click.argument("what", shell_complete=completion.jobs),
    click.option(
        "--output",
        "-o",
        type=page_file,
        metavar="FILE",
        help="Write the page to this file, - for stdout; <name>.html in this directory if left out.",
    ),
    epilog=EXIT_CODES,
)
async def report(session: Session, *, what: str, output: str | None) -> int:
    """Write the page of a job, of a key with all its attempts, or of a workflow, as one self-contained HTML file.

    WHAT is the name of a job; else a key; else the ID of a KFP or Airflow run, or DAG/RUN; else the first part of keys
    such as study/a and study/b. The page has curves of all metrics; that of a workflow compares its trainings. --json
    prints the document of the page, and writes a file only with -o.
    """
    document = await _Found(session, what).document()
    if session.as_json:
        session.answer(document, "")
        if output in (None, "-"):
            return 0
    page = page_html(document)
    if output == "-":
        try:
            sys.stdout.buffer.write(page.encode())
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            raise OutputClosed from None
        return 0
    path = output_file(output or f"{_file_name(document)}.html")
    path.write_text(page, encoding="utf-8")
    echo(str(path), err=session.as_json)
    return 0


def _file_name(document: dict[str, Any]) -> str:
    if document["kind"] == "training":
        return str(document["name"])
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", document["title"]).strip("-.")[:100] or "workflow"


class _Found:
    """The job, the key or the workflow that a person means: the first of them that exists."""

    def __init__(self, session: Session, what: str) -> None:
        self._session = session
        self._what = what.strip()
        self._tried: list[str] = []

    async def document(self) -> dict[str, Any]:
        """Its document.

        Raises:
            click.UsageError: There is none, or several workflows match.
        """
        for find in (self._job, self._key, self._study, self._workflow):
            if (document := await find()) is not None:
                return document
        what = one_line(self._what, _SHOWN)
        tried = "".join(f"\n  {each}" for each in self._tried)
        jobs = self._session.command("list", "-n", self._session.namespace)
        raise click.UsageError(f"nothing is named {what!r}; looked for:{tried}\nlist the jobs: {jobs}")

    async def _job(self) -> dict[str, Any] | None:
        namespace, _, name = self._what.rpartition("/")
        if not names.JOB.fullmatch(name) or (namespace and not names.NAMESPACE.fullmatch(namespace)):
            return None
        where = namespace or self._session.namespace
        self._tried.append(f"TrainJob {where}/{name}")
        try:
            return await take_document(self._session.backend, where, name)
        except NotFound:
            return None
        except ConfigurationError as error:
            if not namespace:
                raise
            # A key such as nightly/train looks like a job of another namespace, which may be forbidden.
            self._tried[-1] += f" (cannot be read: {one_line(str(error), _SHOWN)})"
            return None

    async def _key(self) -> dict[str, Any] | None:
        namespace = self._session.namespace
        self._tried.append(f"jobs with the key {one_line(self._what, _SHOWN)!r} in namespace {namespace}")
        if not self._what:
            return None
        jobs = await self._session.backend.find(namespace, labels_of(self._what))
        jobs = latest_attempts(job for job in jobs if _key_of(job) == self._what)
        return await self._read(jobs[0]) if jobs else None

    async def _study(self) -> dict[str, Any] | None:
        self._tried.append(f"the study of the key {one_line(self._what, _SHOWN)!r}")
        if not self._what:
            return None
        try:
            state = await anyio.to_thread.run_sync(find_study, key_hash(self._what))
        except ConfigurationError as error:
            self._tried[-1] += f" (cannot be read: {one_line(str(error), _SHOWN)})"
            return None
        if state is None or state.namespace != self._session.namespace:
            return None
        return await anyio.to_thread.run_sync(document_of_study, state)

    async def _workflow(self) -> dict[str, Any] | None:
        backend, namespace, what = self._session.backend, self._session.namespace, self._what
        shown = one_line(what, _SHOWN)
        self._tried.append(f"the KFP run or Airflow run {shown!r}, or DAG/RUN, in namespace {namespace}")
        self._tried.append(f"jobs whose keys begin with {shown.rstrip('/') + '/'!r} in namespace {namespace}")
        if not what.strip("/"):
            return None
        jobs = {
            job["metadata"]["uid"]: job for labels in selectors(what) for job in await backend.find(namespace, labels)
        }
        runs: dict[tuple[tuple[str, str], ...], list[TrainJob]] = {}
        for job in jobs.values():
            runs.setdefault(tuple(run_labels(job).items()), []).append(job)
        if len(runs) > 1:
            titles = sorted(title_of(found[0]) or found[0]["metadata"]["name"] for found in runs.values())
            listed = "".join(f"\n  {one_line(title, _SHOWN)}" for title in titles[:_CHOICES])
            raise click.UsageError(f"{shown!r} names {len(runs)} workflows; write DAG/RUN for one of them:{listed}")
        if runs:
            (members,) = runs.values()
            return await self._compared(title_of(members[0]) or what, members)
        prefix = f"{what.rstrip('/')}/"
        every = await backend.find(namespace, {MANAGED_BY: "trainjob"})
        members = [job for job in every if _key_of(job).startswith(prefix)]
        return await self._compared(prefix, members) if members else None

    async def _compared(self, title: str, jobs: Sequence[TrainJob]) -> dict[str, Any]:
        return await compared(title, jobs, partial(self._read, tail=0))

    async def _read(self, job: TrainJob, tail: int = LINES) -> dict[str, Any]:
        metadata = job["metadata"]
        return await take_document(self._session.backend, metadata["namespace"], metadata["name"], tail=tail)


def _key_of(job: TrainJob) -> str:
    return str(mapping(job, "metadata", "annotations").get(KEY) or "")


# ---------------------------------------------------------------- ui


@command(
    click.option(
        "--port", type=click.IntRange(0, 65535), default=0, help="Listen on this port; on a free one if left out."
    ),
    click.option("--no-browser", is_flag=True, help="Do not open the address in a browser."),
    epilog=EXIT_CODES,
)
def ui(session: Session, *, port: int, no_browser: bool) -> int:
    """Serve live pages of the jobs of the namespace on 127.0.0.1, until Ctrl-C.

    Prints an address with a random token: the list of jobs, a page for each job, and a page for each workflow that
    compares its trainings. Works for a cluster and for the jobs of this machine.
    """
    ended = threading.Event()
    with ExitStack() as stack:
        stack.enter_context(handled(lambda *_: ended.set()))
        client = stack.enter_context(TrainJobClient(session.given_backend, session.given_namespace))
        server = Server(client, port)
        _check(server)
        stack.enter_context(server)
        session.say(f"jobs of namespace {client.namespace}; Ctrl-C ends the server")
        session.answer({"url": server.url, "namespace": client.namespace}, server.url)
        if not no_browser and sys.stdout.isatty() and _has_display():
            stack.enter_context(_browser(server.url))
        ended.wait()
    return 0


def _check(server: Server) -> None:
    """Report a configuration that cannot work; an outage is reported by the pages."""

    async def list_jobs() -> None:
        with anyio.move_on_after(_FIRST_READ_SECONDS):
            await server.documents.listed()

    try:
        with suppress(NotFound):
            server.client.call(list_jobs)
    except TrainJobError:
        server.server_close()
        raise


def _has_display() -> bool:
    """Whether a browser has a window: elsewhere, a text browser could take the terminal."""
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


@contextmanager
def _browser(url: str) -> Iterator[None]:
    """Open the address in a browser, by a file that leads to it: other users can read a command line."""
    with tempfile.TemporaryDirectory(prefix="trainjob-ui-") as directory:  # for this user only
        page = Path(directory, "open.html")
        page.write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(url)}">', encoding="utf-8")
        threading.Thread(target=webbrowser.open, args=(page.as_uri(),), daemon=True).start()
        yield
