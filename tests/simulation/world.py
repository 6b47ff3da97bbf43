"""One world: a cluster, processes, and a scheduler that answers each request when and how a schedule says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal, get_args

import httpx
from tests.fakes.kube.cluster import Cluster
from tests.fakes.kube.objects import is_active, is_queued, key_of
from tests.fakes.kube.replies import Reply
from tests.fakes.kube.server import Refused
from tests.simulation.actions import ACTIONS
from tests.simulation.processes import LAUNCHERS, Process
from tests.simulation.settings import Settings
from tests.simulation.transport import Sent, Watch
from tests.simulation.virtual import EPOCH, Unsettled, VirtualLoop, seed_numbers

from trainjob._backends.kubernetes.client import Timings

Mode = Literal["ok", "killbefore", "killafter", "killlate", "lost", "noreply", "late", "slow", "hang", "repeat", "503"]
"""How a request is answered:

* ``ok``: it is applied and answered.
* ``killbefore``, ``killafter``: its process is killed before it is sent, or after it is applied.
* ``killlate``: its process is killed, and it is applied later.
* ``lost``, ``noreply``: the connection breaks before it is applied, or after.
* ``late``: its client gives up, and it is applied later.
* ``slow``: it is applied and answered after 17 s, as by a slow webhook.
* ``hang``: the same as ``late``, but its client gives up after 30 s, or earlier by `start_timeout`.
* ``repeat``: a proxy sends it twice, and the second reply is returned.
* ``503``: it is refused.
"""

_MODES = get_args(Mode)
_SLOW_SECONDS = 17.0  # more than the shortest start_timeout; a launch then looks for its job for 5 s
_READ_SECONDS = Timings().read
_LATE_SECONDS = 924.6  # after which Linux gives up a connection without acknowledgements (tcp_retries2 = 15)
_MOST_ANSWERS = 3_000  # of one `until`, `run` or `quiet`


class World:
    """A cluster, its processes, and the requests between them.

    Args:
        settings: What stays the same.
        mix: Kind of the schedule.

    Attributes:
        server: The cluster.
        processes: All processes, in their order.
        pending: Requests on their way.
        late: Requests whose clients have given up, and that will arrive; each with the time since when.
        hanging: Requests that are not answered until their clients give up.
        watches: Open watches.
        trace: The actions that were possible.
        checked: Called after each action.
    """

    def __init__(self, settings: Settings, mix: str) -> None:
        self.settings = settings
        self.mix = mix
        self.checked: Callable[[], None] = lambda: None
        self.loop = VirtualLoop(self._own)
        self.server: Cluster = Cluster(lambda: self.loop.now, EPOCH)
        leases = frozenset({"leases"})
        may_read, may_write = settings.leases != "none", settings.leases == "write"
        self.server.forbidden = (frozenset() if may_read else leases, frozenset() if may_write else leases)
        self.processes: list[Process] = []
        self.pending: list[Sent] = []
        self.late: list[tuple[float, Sent]] = []
        self.hanging: list[Sent] = []
        self.watches: list[Watch] = []
        self.trace: list[str] = []
        self._current: Process | None = None
        self._owners: dict[asyncio.Task[Any], Process] = {}
        self._tries: dict[str, int] = {}
        seed_numbers(settings.seed)

    # --- tasks and requests of processes

    def _own(self, task: asyncio.Task[Any]) -> None:
        """Remember whose task it is: that of the process whose code creates it."""
        try:
            creator = asyncio.current_task(self.loop)
        except RuntimeError:
            creator = None
        process = self._owners.get(creator) if creator is not None else self._current
        if process is None:
            return
        self._owners[task] = process
        process.tasks.add(task)
        task.add_done_callback(self._disown)
        if process.dead:
            task.cancel()

    def _disown(self, task: asyncio.Task[Any]) -> None:
        self._owners.pop(task).tasks.discard(task)

    def _take(self, sent: Sent) -> None:
        sent.logged = len(self.server.log)
        self.pending.append(sent)
        sent.answer.add_done_callback(lambda answer: self._give_up(sent) if answer.cancelled() else None)

    def _give_up(self, sent: Sent) -> None:
        """The client of a request on its way has given up: it may arrive all the same."""
        for requests in (self.pending, self.hanging):
            if sent in requests:
                requests.remove(sent)
                self.late += [(self.loop.now, sent)] if sent.changes else []

    def process(self, name: str) -> Process | None:
        """The process of that name."""
        return next((each for each in self.processes if each.name == name), None)

    def request_of(self, name: str, kind: str = "") -> Sent | None:
        """The first request of a process that is on its way, of that kind."""
        return next((each for each in self.pending if each.process.name == name and kind in ("", each.kind)), None)

    # --- actions

    def act(self, text: str) -> bool:
        """Do an action, if it is possible, let the processes react, and check the properties."""
        word, *rest = text.split()
        done = ACTIONS[word](self, rest)
        if done:
            self.trace.append(text)
        self.settle()
        return done

    def settle(self) -> None:
        """Let the processes run until each waits, then check the properties."""
        self.loop.settle()
        self.checked()

    def spawn(self, kind: str, key: str, option: str = "") -> bool:
        """Start a process."""
        action, _, number = option.partition(":")
        if kind in LAUNCHERS:
            self._tries[key] = self._tries.get(key, 0) + 1
        tried = int(number) if number else self._tries.get(key, 1)
        name = f"p{len(self.processes) + 1}"
        process = Process(name, kind, key, action, tried, self.settings, self._take, lambda: len(self.server.log))
        self.processes.append(process)
        self._current = process
        self.loop.create_task(process.run())
        self._current = None
        return True

    def kill(self, name: str) -> bool:
        """Kill a process; its requests on their way are lost."""
        process = self.process(name)
        if process is None or not process.is_living:
            return False
        for requests in (self.pending, self.hanging):
            requests[:] = [each for each in requests if each.process is not process]
        process.kill()
        return True

    def answer(self, name: str, mode: str, *kind: str) -> bool:
        """Answer the first request of a process."""
        assert mode in _MODES, mode
        sent = self.request_of(name, " ".join(kind))
        if sent is None:
            return False
        self.pending.remove(sent)
        if mode in ("late", "killlate"):
            self.late.append((self.loop.now, sent))
        if mode in ("killbefore", "killlate"):
            self.kill(name)
        elif mode in ("lost", "late"):
            error = httpx.ReadError("the connection broke") if mode == "lost" else httpx.ReadTimeout("no reply")
            self._fail(sent, error)
        elif mode == "hang":
            self.hanging.append(sent)
            self.loop.call_later(_READ_SECONDS, self._time_out, sent)
        elif mode == "slow":
            self.loop.call_later(_SLOW_SECONDS, self._answer_applied, sent, "ok")
        elif mode == "503":
            self._reply(sent, Reply(503, EPOCH + self.loop.now, b"unavailable"))
        elif sent.watches:
            watch = Watch(sent, self.server, self.watches.remove)
            self.watches.append(watch)
            self._reply(sent, Reply(200, EPOCH + self.loop.now, watch=watch))
        else:
            self._answer_applied(sent, mode)
        return True

    def _time_out(self, sent: Sent) -> None:
        self._give_up(sent)
        self._fail(sent, httpx.ReadTimeout("no reply"))

    def _answer_applied(self, sent: Sent, mode: str) -> None:
        """Apply a request, and answer it."""
        if mode == "repeat":
            self._apply(sent)
        reply, after = self._apply(sent)
        if mode == "killafter":
            self.kill(sent.process.name)
        elif mode == "noreply":
            self._fail(sent, httpx.ReadError("the reply is lost"))
        elif after:
            self.loop.call_later(after, self._reply, sent, reply)
        else:
            self._reply(sent, reply)

    def _apply(self, sent: Sent) -> tuple[Reply, float]:
        process, log = sent.process, self.server.log
        first = len(log)
        try:
            content = self.server.handle(
                process.name, sent.method, sent.path, sent.params, sent.body, is_worker=process.kind != "reap"
            )
        except Refused as refused:
            return Reply(refused.status, EPOCH + self.loop.now, refused.body), refused.after
        finally:
            for entry in log[first : first + 1]:  # reads of a log of a container are not logged
                entry.sent = sent.logged
        return Reply(200, EPOCH + self.loop.now, content), 0.0

    @staticmethod
    def _reply(sent: Sent, reply: Reply) -> None:
        if not sent.answer.done():
            sent.answer.set_result(reply)

    @staticmethod
    def _fail(sent: Sent, error: Exception) -> None:
        if not sent.answer.done():
            sent.answer.set_exception(error)

    def apply_late(self) -> bool:
        """The oldest late request arrives, unless it is too late."""
        if not self.late:
            return False
        since, sent = self.late.pop(0)
        if self.loop.now - since <= _LATE_SECONDS:
            self._apply(sent)
        return True

    def deliver(self, name: str, plural: str) -> bool:
        """Deliver the events of a watch of a process."""
        behind = [each for each in self.watches if each.process.name == name and each.plural == plural]
        behind = [each for each in behind if each.is_behind]
        for each in behind:
            each.deliver()
        return bool(behind)

    def cut(self, name: str) -> bool:
        """Break the watches of a process."""
        found = [each for each in self.watches if each.process.name == name]
        for each in found:
            each.cut()
        return bool(found)

    # --- several steps

    def due(self) -> float | None:
        """When something happens next if no request is answered."""
        times = [each for each in (self.loop.due(), self.server.due()) if each is not None]
        return min(times, default=None)

    def tick(self, seconds: float | None = None) -> bool:
        """Let time pass, by default until the next timer."""
        if seconds is None:
            due = self.due()
            if due is None:
                return False
            seconds = max(0.0, due - self.loop.now)
        self.loop.now += seconds
        self.server.advance()
        return True

    def until(self, name: str, *wanted: str) -> bool:
        """Answer everything of one process, with events and timers, until it is in a stage or has sent a request."""
        kind = " ".join(wanted)
        process = self.process(name)
        if process is None:
            return False
        for _ in range(_MOST_ANSWERS):
            self.settle()
            if not process.is_living or process.stage == kind or (" " in kind and self.request_of(name, kind)):
                return True
            if not (self._serve(process) or self.tick()):
                return True
        raise Unsettled(f"{process} sends requests without end")

    def run(self, name: str) -> bool:
        """Answer everything of one process, with its events."""
        process = self.process(name)
        if process is None:
            return False
        for number in range(_MOST_ANSWERS):
            self.settle()
            if not self._serve(process):
                return number > 0
        raise Unsettled(f"{process} sends requests without end")

    def _serve(self, process: Process) -> bool:
        """Answer one request of a process, or deliver its events."""
        if self.answer(process.name, "ok"):
            return True
        delivered = [self.deliver(process.name, each) for each in ("trainjobs", "pods")]
        return any(delivered)

    def quiet(self) -> None:
        """Answer everything of all processes, with their events, until all wait for time to pass."""
        for _ in range(_MOST_ANSWERS):
            self.settle()
            if self.pending:
                sent = self.pending[0]
                self.answer(sent.process.name, "ok", *sent.kind.split())
                continue
            behind = [each for each in self.watches if each.is_behind]
            if not behind:
                return
            for each in behind:
                each.deliver()
        raise Unsettled("requests follow each other without end")

    def rest(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let time pass while everything is answered."""
        end = self.loop.now + seconds
        self.quiet()
        while not until():
            due = self.due()
            if due is None or due > end:
                self.loop.now = max(self.loop.now, end)
                self.server.advance()
                self.quiet()
                return
            self.tick()
            self.quiet()

    # --- the end of a schedule

    def recover(self) -> None:
        """End all faults: late requests arrive, webhooks answer, quotas are counted, the runtime exists."""
        while self.apply_late():
            self.settle()
        self.server.webhooks = "answer"
        self.server.quota_conflicts = 0
        self.server.set_runtime(exists=True)
        self.settle()

    def end_jobs(self) -> None:
        """Admit and complete all jobs that may run; all nodes answer again."""
        self.server.find_nodes()
        for job in self.server.jobs():
            if is_queued(job) and key_of(job):
                self.server.admit(job["metadata"]["name"])
        self.quiet()
        for job in self.server.jobs():
            if is_active(job):
                self.server.end(job["metadata"]["name"])
        self.quiet()

    def close(self) -> None:
        """Stop everything."""
        for process in self.processes:
            process.dead = True
        for task in list(self._owners):
            task.cancel()
        self.loop.settle()
        self.loop.create_task(self.loop.shutdown_asyncgens())
        self.loop.settle()
        self.loop.close()
