"""Ranks of the jobs of a backend: their logs, states and reports."""

from __future__ import annotations

import json
import time
from contextlib import aclosing
from dataclasses import replace

import anyio
import pytest
from tests.contract.harness import Harness, until

from trainjob import JobRef, LogLine, Phase
from trainjob._backends.base import TrainJob
from trainjob._jobs import models
from trainjob._pages.live import take_document
from trainjob._support.kube_objects import rank_of
from trainjob.job import MANAGED_BY
from trainjob.status import observe

REPORT = "${TRAINJOB_TERMINATION_LOG:-/dev/termination-log}"

# ---------------------------------------------------------------- logs


async def test_logs_of_all_ranks_are_ordered(shell: Harness) -> None:
    ref = await shell.run('for i in 1 2 3; do echo "$JOB_COMPLETION_INDEX: $i"; sleep 0.1; done', num_nodes=2)
    await shell.ended(ref)
    lines = await shell.lines(ref)
    assert [line.time for line in lines] == sorted(line.time for line in lines)
    for rank in ("0", "1"):
        texts = [line.text for line in lines if line.rank == f"node-{rank}"]
        assert texts == [f"{rank}: {i}" for i in (1, 2, 3)]
    assert [line.rank for line in await shell.lines(ref, ranks=["node-1"])] == ["node-1"] * 3


@pytest.mark.parametrize(
    ("script", "follow", "texts"),
    [
        ("sleep 0.3; echo one; sleep 0.3; echo two >&2; sleep 0.3; echo three", True, ["one", "two", "three"]),
        (
            r"printf '\377\376ab\n10%%\r20%%\r\n\n\tz\033[1m\nno end'",
            False,
            ["\ufffd\ufffdab", "20%", "", "\tz\x1b[1m", "no end"],
        ),
        (r"head -c 16384 /dev/zero | tr '\0' x", False, ["x" * 16384]),
    ],
    ids=["both streams, followed", "invalid bytes and control characters", "a line without its end"],
)
async def test_logs_have_the_lines_of_a_rank(shell: Harness, script: str, follow: bool, texts: list[str]) -> None:
    ref = await shell.run(script)
    if not follow:
        await shell.ended(ref)
    assert await shell.texts(ref, follow=follow) == texts


async def test_follow_streams_while_the_job_runs(shell: Harness) -> None:
    """Logs that are not followed end at the present."""
    ref = await shell.run("echo one; sleep 60")
    async with aclosing(shell.backend.logs(ref, follow=True)) as lines:
        with anyio.fail_after(240):
            assert (await anext(lines)).text == "one"

    async def read() -> bool:
        return await shell.texts(ref) == ["one"]

    await until(read)
    assert not await shell.backend.stopped(ref)


async def test_tails_have_each_pod_with_its_last_lines(shell: Harness) -> None:
    ref = await shell.run('for i in 1 2 3; do echo "$JOB_COMPLETION_INDEX: $i"; done; sleep 60', num_nodes=2)
    found: dict[str, list[str]] = {}

    async def read() -> bool:
        async with aclosing(shell.backend.tails(ref, 2)) as tails:
            found.update({rank_of(pod): [line.text for line in lines] async for pod, lines in tails})
        return all(len(found.get(f"node-{rank}", ())) == 2 for rank in (0, 1)) and "3" in found["node-1"][-1]

    await until(read)
    assert found == {"node-0": ["0: 2", "0: 3"], "node-1": ["1: 2", "1: 3"]}


async def test_logs_resume_after_any_line(shell: Harness) -> None:
    ref = await shell.run("seq 200", num_nodes=2)
    await shell.ended(ref)
    lines = await shell.lines(ref)
    assert len(lines) == 400
    for stop in (0, 1, 199, 399):
        assert await shell.lines(ref, since=lines[stop].time) == lines[stop + 1 :]


async def test_tail_limits_the_lines_of_each_rank(shell: Harness) -> None:
    async with shell.gate() as (waits, opened):
        ref = await shell.run(f"seq 5000; {waits}; echo late", num_nodes=2)

        async def written() -> bool:
            return await shell.texts(ref, tail=1) == ["5000", "5000"]

        await until(written)
        lines: list[LogLine] = []
        with anyio.fail_after(240):
            async with aclosing(shell.backend.logs(ref, tail=2, follow=True)) as following:
                async for line in following:
                    lines.append(line)
                    if len(lines) == 4:
                        opened.set()
    for rank in ("node-0", "node-1"):
        assert [line.text for line in lines if line.rank == rank] == ["4999", "5000", "late"]
    assert await shell.lines(ref, tail=0) == []


async def test_a_long_log_is_read_completely(shell: Harness) -> None:
    ref = await shell.run("seq 100000", num_nodes=2)
    assert len(await shell.lines(ref, follow=True)) == 200_000
    lines = await shell.lines(ref)
    assert [line.text for line in lines if line.rank == "node-1"] == [str(n) for n in range(1, 100_001)]
    assert [line.time for line in lines] == sorted(line.time for line in lines)


async def test_a_progress_bar_without_a_final_newline_becomes_a_line(shell: Harness) -> None:
    ref = await shell.run(r"echo begun; printf '\r10%%'; printf '\r20%%\r30%%'")
    await shell.ended(ref)
    lines = await shell.lines(ref)
    assert [(line.text, line.transient) for line in lines] == [("begun", False), ("30%", False)]
    assert [line for line in await shell.lines(ref, follow=True) if not line.transient] == lines


async def test_logs_split_a_line_of_a_megabyte(shell: Harness) -> None:
    ref = await shell.run("head -c 1048576 /dev/zero | tr '\\0' x; echo; echo after")
    await shell.ended(ref)
    *parts, after = await shell.texts(ref)
    assert "".join(parts) == "x" * 1048576
    assert after == "after"
    assert max(len(part) for part in parts) <= 16 * 1024


# ---------------------------------------------------------------- states


def exit_codes(pod: TrainJob) -> list[int]:
    return [status["state"]["terminated"]["exitCode"] for status in pod["status"]["containerStatuses"]]


async def test_evidence_has_exit_codes_and_logs_of_all_ranks(shell: Harness) -> None:
    script = 'echo "rank $JOB_COMPLETION_INDEX"; [ $JOB_COMPLETION_INDEX = 0 ] && sleep 60; exit 3'
    ref = await shell.run(script, num_nodes=2)
    await shell.ended(ref)
    evidence = await shell.backend.evidence(ref)
    assert evidence.trainjob is not None
    assert evidence.trainjob["metadata"]["uid"] == ref.uid
    assert {rank_of(pod): exit_codes(pod) for pod in evidence.pods} == {"node-0": [143], "node-1": [3]}
    assert sorted(line for lines in evidence.logs.values() for line in lines) == ["rank 0", "rank 1"]


async def test_state_has_the_job_and_its_pods(harness: Harness) -> None:
    ref = await harness.create()
    await harness.end(ref, 3)
    await harness.ended(ref)
    before = len(harness.requests)
    state = await harness.backend.state(ref)
    assert len(harness.requests) - before <= 2, harness.requests[before:]
    assert observe(state.trainjob).phase is Phase.FAILED
    assert state.trainjob is not None
    assert state.trainjob["metadata"]["uid"] == ref.uid
    assert [exit_codes(pod) for pod in state.pods] == [[3]]
    assert state.pods == (await harness.backend.evidence(ref)).pods
    assert (dict(state.logs), list(state.events), list(state.unseen)) == ({}, [], [])
    assert state.pods_visible


async def test_states_are_those_of_all_jobs_with_the_labels(harness: Harness) -> None:
    refs = [await harness.create(attempt=attempt) for attempt in (1, 2)]
    await harness.end(refs[0], 3)
    await harness.ended(refs[0])
    before = len(harness.requests)
    states = await harness.backend.states(refs[0].namespace, {MANAGED_BY: "trainjob"})
    found = {state.trainjob["metadata"]["uid"]: state for state in states if state.trainjob is not None}
    if harness.backend.cluster is not None:
        assert len(harness.requests) - before == 2, harness.requests[before:]
    assert {ref.uid for ref in refs} <= found.keys()
    assert [exit_codes(pod) for pod in found[refs[0].uid].pods] == [[3]]
    assert await harness.backend.states(refs[0].namespace, {MANAGED_BY: "nobody"}) == []


async def test_state_of_a_running_job_has_its_running_ranks(shell: Harness) -> None:
    ref = await shell.run("echo one; sleep 60", num_nodes=2)
    ranks: dict[str, str] = {}

    async def running() -> bool:
        state = await shell.backend.state(ref)
        assert (dict(state.logs), list(state.events)) == ({}, [])
        ranks.update({rank_of(pod): pod["status"]["phase"] for pod in state.pods})
        return set(ranks.values()) == {"Running"} and observe(state.trainjob).phase is Phase.RUNNING

    await until(running)
    assert ranks == {"node-0": "Running", "node-1": "Running"}
    await until(lambda: shell.backend.has_run(ref))
    assert not await shell.backend.has_run(replace(ref, name="nosuch", uid="nosuch"))


# ---------------------------------------------------------------- reports


async def test_the_model_of_a_finished_job_is_found(shell: Harness) -> None:
    metrics = [{"name": "accuracy", "value": "0.97"}]
    message = json.dumps({"trainjob": 1, "metrics": metrics, "outputs": {"model": "s3://models/1"}})
    ref = await shell.run(f"echo '{message}' > {REPORT}")
    await shell.ended(ref)
    found = await models.find(shell.backend, JobRef(ref.namespace, ref.name, ""))
    assert (found.ref, found.source, found.metrics) == (ref, "s3://models/1", {"accuracy": 0.97})
    on_this_machine = shell.backend.home is not None
    assert (bool(found.target), "images" not in found.provenance) == (on_this_machine, on_this_machine)


async def test_a_document_has_what_a_running_training_reported(shell: Harness) -> None:
    """A cluster shows the message of a rank only after the end of the rank."""
    now = int(time.time())
    series = {"loss": [[100, now - 20, 0.9], [200, now - 10, 0.5]], "trainjob.checkpoint": [[200, now - 5, 200]]}
    metrics = [{"name": "loss", "value": "0.5"}, {"name": "trainjob.checkpoint", "value": "200"}]
    message = json.dumps({"trainjob": 1, "metrics": metrics, "history": series})
    async with shell.gate() as (waits, opened):
        ref = await shell.run(f"echo '{message}' > {REPORT}; echo reported; {waits}")
        async with aclosing(shell.backend.logs(ref, follow=True)) as lines:
            with anyio.fail_after(240):
                assert (await anext(lines)).text == "reported"

        async def is_running() -> bool:  # a cluster's status can be later than the lines
            return observe((await shell.backend.state(ref)).trainjob).phase is Phase.RUNNING

        await until(is_running)
        state = await shell.backend.state(ref)
        running = await take_document(shell.backend, ref.namespace, ref.name)
        opened.set()
        await shell.ended(ref)  # within the gate: its rank may not have connected yet
    final = await take_document(shell.backend, ref.namespace, ref.name)
    assert (running["phase"], final["phase"]) == ("Running", "Complete")
    assert running["logs"][-1]["text"] == "reported"
    on_this_machine = shell.backend.home is not None
    assert json.loads(state.reported or "null") == (json.loads(message) if on_this_machine else None)
    for document in (final, running) if on_this_machine else (final,):
        assert document["metrics"] == {"loss": 0.5}
        assert document["history"] == {"loss": series["loss"]}
        assert [each["step"] for each in document["attempts"][-1]["checkpoints"]] == [200]
