"""The actions of schedules.

A schedule is a list of actions, one a line:

===================================  ===================================================================================
``spawn KIND KEY [OPTION]``          start a process; they are called p1, p2, … in their order
``do P MODE [METHOD PLURAL]``        answer the first request of a process (of that kind); see `Mode`
``until P STAGE``                    answer everything of a process until it is in that stage or has ended
``until P METHOD PLURAL``            the same until such a request of it is on its way
``run P``                            the same until it waits for an event or for time to pass
``late``                             the oldest late request arrives
``watch P PLURAL``, ``cut P``        deliver the events of a watch; break all watches of a process
``kill P``                           SIGKILL; requests on their way are lost
``tick [SECONDS]``                   time passes; without a number, until the next timer or the end of a pod
``report JOB``                       a training reports progress, which changes the version of its job
``crash JOB [oom]``, ``end JOB N``   a rank crashes in place; a job completes (0) or fails
``takeback JOB``, ``lose JOB``       the JobSet of a failed job is deleted; the nodes of a job do not answer any more
``admit JOB``, ``preempt JOB``       Kueue
``ttl JOB``                          a job that has ended is deleted by its TTL
``delete JOB [Foreground]``          a person with kubectl; also ``suspend JOB`` and ``resume JOB``
``webhooks answer|refuse|hang``      what the webhooks of TrainJobs do
``quota N``, ``runtime on|off``      the next N changes get a Conflict of a quota; the runtime exists or not
``compact``                          the server forgets old versions
``log TEXT``                         what the log of each container has
===================================  ===================================================================================

A job is written as ``KEY#ATTEMPT``. An action that is not possible does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.fakes.kube.cluster import Cluster
from tests.fakes.kube.objects import is_ended, is_suspended
from tests.simulation.settings import full_name

if TYPE_CHECKING:
    from tests.simulation.world import World


def _kubectl(method: str, body: Callable[[World, list[str]], dict[str, Any]], *, ended: bool = True) -> Any:
    def act(world: World, words: list[str]) -> bool:
        name = full_name(words[0])
        job = world.server.get("trainjobs", name)
        if job is None or (is_ended(job) and not ended):
            return False
        return world.server.by_person(method, name, body(world, words[1:]))

    return act


def _on_job(method: Callable[..., bool]) -> Callable[[World, list[str]], bool]:
    return lambda world, words: method(world.server, full_name(words[0]))


def _crash(world: World, words: list[str]) -> bool:
    cause = ("OOMKilled", 137) if words[1:] == ["oom"] else ()
    return world.server.crash(full_name(words[0]), *cause)


def _ttl(world: World, words: list[str]) -> bool:
    job = world.server.get("trainjobs", full_name(words[0]))
    body = {"propagationPolicy": "Background"}
    return job is not None and is_ended(job) and world.server.by_person("DELETE", job["metadata"]["name"], body, "ttl")


def _resume(world: World, words: list[str]) -> bool:
    job = world.server.get("trainjobs", full_name(words[0]))
    return job is not None and is_suspended(job) and _RESUME(world, words)


def _webhooks(world: World, words: list[str]) -> bool:
    if world.server.webhooks == words[0]:
        return False
    world.server.webhooks = words[0]  # type: ignore[assignment]
    return True


def _quota(world: World, words: list[str]) -> bool:
    world.server.quota_conflicts = int(words[0])
    return True


def _compact(world: World, words: list[str]) -> bool:
    world.server.forget_history()
    for watch in world.watches:
        watch.deliver()
    return True


def _log(world: World, words: list[str]) -> bool:
    world.server.logs = f"2026-11-25T10:00:00.000000001Z {' '.join(words)}\n".encode()
    return True


_RESUME = _kubectl("PATCH", lambda world, words: {"spec": {"suspend": False}}, ended=False)

ACTIONS: dict[str, Callable[[World, list[str]], bool]] = {
    "spawn": lambda world, words: world.spawn(*words),
    "do": lambda world, words: world.answer(*words),
    "until": lambda world, words: world.until(*words),
    "run": lambda world, words: world.run(*words),
    "late": lambda world, words: world.apply_late(),
    "watch": lambda world, words: world.deliver(*words),
    "cut": lambda world, words: world.cut(*words),
    "kill": lambda world, words: world.kill(*words),
    "tick": lambda world, words: world.tick(*map(float, words)),
    "crash": _crash,
    "end": lambda world, words: world.server.end(full_name(words[0]), int(words[1])),
    "report": _on_job(Cluster.report),
    "takeback": _on_job(Cluster.take_back),
    "lose": _on_job(Cluster.lose_node),
    "admit": _on_job(Cluster.admit),
    "preempt": _on_job(Cluster.preempt),
    "ttl": _ttl,
    "delete": _kubectl("DELETE", lambda world, words: {"propagationPolicy": words[0] if words else "Background"}),
    "suspend": _kubectl("PATCH", lambda world, words: {"spec": {"suspend": True}}, ended=False),
    "resume": _resume,
    "webhooks": _webhooks,
    "quota": _quota,
    "runtime": lambda world, words: world.server.set_runtime(exists=words[0] == "on"),
    "compact": _compact,
    "log": _log,
}
