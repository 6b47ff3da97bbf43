"""Failures that a generator draws: the example of a rule, in a disguise. What is right is known by construction.

40 in each run, 500 in `make campaign`. No word in the training's own code, in a handled exception or in another
language decides; what a library raised is recognized through whatever prints it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from tests import campaigns
from tests.unit.rule_examples import diagnosed, log_of

from trainjob._diagnosis import output
from trainjob._diagnosis.rules.raised import PEER, RAISED
from trainjob._diagnosis.rules.row import RaisedRule
from trainjob._diagnosis.tracebacks import Raised
from trainjob.errors import Category, RetryVerdict

HEAD = "Traceback (most recent call last):"
FRAME = '  File "/app/train.py", line 9, in <module>'
CAUSED = "\nThe above exception was the direct cause of the following exception:\n"
DURING = "\nDuring handling of the above exception, another exception occurred:\n"
OWN = (Category.USER_CODE, RetryVerdict.UNKNOWN)

TRACED = [rule for rule in RAISED if any(line.startswith(HEAD) for line in log_of(rule))]
COUNT = campaigns.runs(500, 40)


@dataclass(frozen=True)
class Drawn:
    """A failure.

    Attributes:
        log: The end of the rank's log.
        expected: Category and verdict.
        quoted: What the summary quotes.
        code: Exit code.
    """

    log: Sequence[str]
    expected: tuple[Category, RetryVerdict]
    quoted: str = ""
    code: int = 1


def traceback_of(rule: RaisedRule) -> list[str]:
    """The last traceback of the example, with its message."""
    log = log_of(rule)
    return log[max(number for number, line in enumerate(log) if line.startswith(HEAD)) :]


def raised_by(rule: RaisedRule) -> Raised:
    found = output.read(traceback_of(rule)).raised
    assert found is not None
    return found


def known(rule: RaisedRule) -> tuple[Category, RetryVerdict]:
    return rule.means.category, rule.means.retry


def words_of(rule: RaisedRule) -> str:
    """The exception on one line, as a training might have it in its data."""
    return " ".join(str(raised_by(rule)).split())[:300]


# ---------------------------------------------------------------- disguises under which a failure stays what it is


def in_colors(rule: RaisedRule, _: random.Random) -> Drawn:
    return Drawn([f"\x1b[31m{line}\x1b[0m" for line in log_of(rule)], known(rule))


def in_json(rule: RaisedRule, _: random.Random) -> Drawn:
    record = {"level": "ERROR", "msg": "the training failed", "exc_info": "\n".join(traceback_of(rule))}
    return Drawn([json.dumps({"level": "INFO", "msg": "step 3"}), json.dumps(record)], known(rule))


def of_a_worker(rule: RaisedRule, chance: random.Random) -> Drawn:
    """PyTorch's hook writes the rank before each line; another worker writes on."""
    rank = chance.randrange(8)
    return Drawn([*(f"[rank{rank}]: {line}" for line in traceback_of(rule)), "epoch 3 of another worker"], known(rule))


def wrapped(rule: RaisedRule, _: random.Random) -> Drawn:
    own = [HEAD, FRAME, '    raise TrainingError("step 3 failed") from error', "app.TrainingError: step 3 failed"]
    return Drawn([*traceback_of(rule), *CAUSED.split("\n"), *own], known(rule), "app.TrainingError: step 3 failed")


def in_a_child(rule: RaisedRule, _: random.Random) -> Drawn:
    spawned = [HEAD, FRAME, "torch.multiprocessing.spawn.ProcessRaisedException: ", ""]
    head = "-- Process 1 terminated with the following error:"
    return Drawn([*spawned, head, *traceback_of(rule)], known(rule))


def in_a_group(rule: RaisedRule, _: random.Random) -> Drawn:
    head = [
        "  + Exception Group Traceback (most recent call last):",
        f"  | {FRAME}",
        "  |     async with anyio.create_task_group() as group:",
        "  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)",
        "  +-+---------------- 1 ----------------",
    ]
    parts = [f"    | {line}" for line in traceback_of(rule)]
    return Drawn([*head, *parts, "    +------------------------------------"], known(rule))


def after_others(rule: RaisedRule, chance: random.Random) -> Drawn:
    """Another failure was handled before."""
    other = chance.choice(TRACED)
    return Drawn([*traceback_of(other), "recovered, going on", "step 4 loss 2.1", *log_of(rule)], known(rule))


SAME = (in_colors, in_json, of_a_worker, wrapped, in_a_child, in_a_group, after_others)

# ---------------------------------------------------------------- disguises that make it the author's own failure


def in_own_raise(rule: RaisedRule, chance: random.Random) -> Drawn:
    words = words_of(rule)
    sources = {
        "ValueError": "raise ValueError(row.text)",
        "KeyError": "raise KeyError(row.text)",
        "RuntimeError": "raise RuntimeError(row.text)",
        "AssertionError": "assert row.ok, row.text",
        raised_by(rule).name: "raise error_of(row)",
    }
    name, source = chance.choice([*sources.items()])
    return Drawn([HEAD, FRAME, f"    {source}", f"{name}: {words}"], OWN, f"{name}: {words[:60]}")


DIVISION = [HEAD, FRAME, "    x = 1 / n", "        ~~^~~", "ZeroDivisionError: division by zero"]


def handled(rule: RaisedRule, _: random.Random) -> Drawn:
    log = [*log_of(rule), "recovered, going on", "step 4 loss 2.1", *DIVISION]
    return Drawn(log, OWN, "ZeroDivisionError")


def during(rule: RaisedRule, _: random.Random) -> Drawn:
    log = [*traceback_of(rule), *DURING.split("\n"), *DIVISION]
    return Drawn(log, OWN, "ZeroDivisionError: division by zero (while")


def on_one_line(rule: RaisedRule, chance: random.Random) -> Drawn:
    """A ``raise`` after a condition, as Python prints its line."""
    name = chance.choice(["ValueError", "RuntimeError", raised_by(rule).name])
    source = chance.choice(["if not row.ok: raise error_of(row)", "done = True; raise error_of(row)"])
    return Drawn([HEAD, FRAME, f"    {source}", f"{name}: {words_of(rule)}"], OWN, f"{name}: {words_of(rule)[:60]}")


def of_an_own_package(rule: RaisedRule, chance: random.Random) -> Drawn:
    """The team installs its code, which raises the message."""
    installed = '  File "/usr/local/lib/python3.12/site-packages/acme_training/data.py", line 7, in load'
    name = chance.choice(["ValueError", "RuntimeError", "OSError"])
    raised = [HEAD, FRAME, "    load()", installed, "    raise error_of(row)", f"{name}: {words_of(rule)}"]
    return Drawn(raised, OWN, f"{name}: {words_of(rule)[:60]}")


def with_others_in_a_group(rule: RaisedRule, chance: random.Random) -> Drawn:
    """A bug of the author, of which the other failures may be a consequence."""
    head = [
        "  + Exception Group Traceback (most recent call last):",
        f"  | {FRAME}",
        "  | ExceptionGroup: two (2 parts)",
    ]
    parts = [traceback_of(rule), DIVISION]
    chance.shuffle(parts)
    log = [
        line
        for number, part in enumerate(parts, 1)
        for line in (f"  +-+---------------- {number} ----------------", *(f"    | {line}" for line in part))
    ]
    return Drawn([*head, *log, "    +------------------------------------"], OWN, "ZeroDivisionError")


def in_data_of_a_client(rule: RaisedRule, chance: random.Random) -> Drawn:
    """Words in an address and in a statement mean nothing."""
    words = words_of(rule).replace("]", ")")
    url = f"https://hub.corp/{'-'.join(words.split())}/resolve/500"
    name, message = chance.choice(
        [
            ("requests.exceptions.HTTPError", f"404 Client Error: Not Found for url: {url}"),
            (
                "sqlalchemy.exc.IntegrityError",
                f"UNIQUE constraint failed\n[SQL: INSERT]\n[parameters: (500, {words!r})]",
            ),
            ("requests.exceptions.InvalidSchema", "No connection adapters were found for 's3://connect/closed'"),
        ]
    )
    return Drawn([HEAD, FRAME, "    load()", *f"{name}: {message}".splitlines()], OWN, name)


def key_of_data(rule: RaisedRule, _: random.Random) -> Drawn:
    words = words_of(rule)
    return Drawn([HEAD, FRAME, "    return labels[row.text]", f"KeyError: {words!r}"], OWN, "KeyError")


def logged(rule: RaisedRule, _: random.Random) -> Drawn:
    return Drawn(
        [f"2026-11-27 10:00:00 WARNING page says: {words_of(rule)}", "the loss is not a number"], OWN, "the loss"
    )


def of_another_language(rule: RaisedRule, chance: random.Random) -> Drawn:
    row = f"bad row: {words_of(rule)}"
    jvm = f'Exception in thread "main" app.BadRow: {words_of(rule)}'
    outputs = [
        (2, "bad row", [f"panic: {row}", "", "goroutine 1 [running]:", "main.main()", "\t/app/main.go:9 +0x1d"]),
        (101, "bad row", ["thread 'main' panicked at src/main.rs:4:5:", row, "note: run with `RUST_BACKTRACE=1`"]),
        (1, "bad row", [f"Error in train(x) : {row}", "Calls: train", "Execution halted"]),
        (1, "app.BadRow", [jvm, "\tat app.Main.main(Main.java:9)"]),
        (7, "bad row", [row]),
    ]
    code, quoted, log = chance.choice(outputs)
    return Drawn(log, OWN, quoted, code)


OTHERS = (
    *(in_own_raise, on_one_line, of_an_own_package, in_data_of_a_client, key_of_data),
    *(handled, during, with_others_in_a_group, logged, of_another_language),
)


def draw(chance: random.Random) -> tuple[str, Drawn]:
    rule = chance.choice(TRACED)
    make: Callable[[RaisedRule, random.Random], Drawn] = chance.choice(SAME + OTHERS)
    return f"{make.__name__}/{rule.id}", make(rule, chance)


@pytest.mark.parametrize("number", range(COUNT))
def test_a_drawn_failure_is_judged_by_what_it_is(number: int) -> None:
    name, drawn = draw(random.Random(f"{campaigns.SEED}/{number}"))
    found = diagnosed(drawn.code, list(drawn.log))
    told = (found.category, found.retry)
    assert told == drawn.expected, f"{name}\n{found.text()}"
    assert drawn.quoted in found.summary, f"{name}\n{found.text()}"


def test_all_disguises_of_all_rules_can_be_drawn() -> None:
    assert len(TRACED) > 50
    assert len({known(rule) for rule in TRACED}) > 8
    assert any(rule.means is PEER for rule in TRACED)
