"""Each reader answers every hostile document as it documents, so that one object stops nothing else."""

from __future__ import annotations

import json
import re
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import httpx
import pytest
from tests.hostile_documents import DOCUMENTS, mutations
from tests.unit.foreign_readers import READERS, Reader
from yaml.error import Mark
from yaml.scanner import ScannerError

from trainjob._diagnosis import output
from trainjob._support.foreign import LENIENT, Unreadable, json_of, mapping_of
from trainjob._support.foreign_yaml import documents_of, yaml_of
from trainjob.errors import ConfigurationError
from trainjob.registry import rest


def answer(reader: Reader, data: bytes, folder: Path) -> object:
    """The value, or the documented error; any other error is that of the test."""
    try:
        return reader.read(data, folder)
    except reader.raises as error:
        return error
    except Exception as error:
        error.add_note(f"it read {data[:200]!r}")
        raise


@pytest.mark.parametrize("name", READERS)
def test_hostile_documents_are_answered_as_documented(name: str, tmp_path: Path) -> None:
    for number, data in enumerate(DOCUMENTS.values()):
        found = answer(READERS[name], data, tmp_path / str(number))
        assert not isinstance(found, Exception) or len(str(found)) < 10_000


@pytest.mark.parametrize("name", READERS)
def test_a_value_of_another_type_in_any_place_is_answered_as_documented(name: str, tmp_path: Path) -> None:
    for number, changed in enumerate(mutations(READERS[name].example)):
        answer(READERS[name], json.dumps(changed).encode(), tmp_path / str(number))


WRONG = {
    "lists of depth 4,000": "it is nested 65 lists and mappings deep, or more; a document has at most 64",
    "lists of depth 65": "it is nested 65 lists and mappings deep, or more; a document has at most 64",
    "2 MiB of text": "it has 2,097,161 bytes; a document has at most 1,048,576",
    "100,000 values": "it has more than 50,000 names and values",
    "an integer of 5,000 digits": "it has an integer of 5,000 digits; at most 400",
    "an integer beyond all floats": "it has an integer of 1,329 bits; at most 1,024",
    "a float beyond all floats": "it has the number inf, which JSON does not have",
    "NaN": "it has the number NaN, which JSON does not have",
    "a lone surrogate": "it has text that is not Unicode (half of a surrogate pair): '\\ud800'",
    "a key twice": "it has the key 'a', which occurs twice",
    "no UTF-8": "it is not UTF-8 text (invalid start byte)",
    "a cut document": "it is not valid JSON: Expecting value, line 1, column 11",
    "a list": "it is not a JSON object",
}


@pytest.mark.parametrize("document", WRONG)
def test_the_error_names_the_document_and_the_limit(document: str) -> None:
    with pytest.raises(Unreadable) as refused:
        mapping_of(DOCUMENTS[document], "Lease ns/x")
    assert str(refused.value) == f"Lease ns/x is not readable: {WRONG[document]}"


def test_values_at_the_limits_are_read() -> None:
    depth = b"[" * 64 + b"]" * 64
    assert json_of(depth, "x")
    assert len(json_of(json.dumps(list(range(49_999))), "x")) == 49_999
    assert json_of(b"1" * 308, "x") == int("1" * 308)
    assert json_of('{"a": NaN, "b": -0, "\u00e4": "\\ud83d\\ude00"}', "x", LENIENT)["\u00e4"] == "\U0001f600"


@pytest.mark.parametrize("text", ["a: 1\nb: 2\na: 3", "{a: 1, a: 1}", '{"a": {"b": 1, "b": 2}}', "- 1: x\n  '1': y"])
def test_a_key_of_yaml_that_occurs_twice_is_refused(text: str) -> None:
    with pytest.raises(Unreadable, match=r"x is not readable: it has the key '\w', which occurs twice, line \d"):
        yaml_of(text, "x")


def test_merged_mappings_are_overridden() -> None:
    text = "a: &a {k: 1, l: 1}\nb: &b {<<: *a, k: 2}\nc: {<<: [*a, *b], k: 3}\nd: {k: k, l: k}\n? [1]\n: 2"
    with pytest.raises(Unreadable, match="not valid YAML"):  # no key of JSON
        yaml_of(text, "x")
    found = yaml_of(text.rpartition("\n?")[0], "x")
    assert (found["b"], found["c"]) == ({"k": 2, "l": 1}, {"k": 3, "l": 1})
    assert found["d"] == {"k": "k", "l": "k"}


@pytest.mark.parametrize("text", ["a: " + "[" * 5000, '{"a": ' + "[" * 5000 + "]" * 5000 + "}", "a: " + "{" * 5000])
def test_the_limit_of_depth_has_one_text_whatever_the_library_does(text: str) -> None:
    ours = r"^x is not readable: it is nested 65 lists and mappings deep, or more; a document has at most 64, line 1"
    with pytest.raises(Unreadable, match=ours):
        yaml_of(text, "x")
    own = ScannerError("while increasing flow level", None, "exceeded maximum nesting depth", Mark("", 0, 0, 9, "", 0))
    with mock.patch("yaml.parse", side_effect=own), pytest.raises(Unreadable, match=ours):  # as PyYAML 6.0.4
        yaml_of(text, "x")


def test_all_documents_of_a_text_are_read() -> None:
    assert documents_of("a: 1\n---\n- 12:30\n", "x") == [{"a": 1}, ["12:30"]]
    with pytest.raises(Unreadable, match="x is not readable: it is not valid YAML: expected a single document"):
        yaml_of("a: 1\n---\nb: 1\n", "x")


class Bomb(httpx.SyncByteStream):
    """A reply of some KB that decompresses to 1 GiB."""

    def __iter__(self) -> Iterator[bytes]:
        made = zlib.compressobj(9, zlib.DEFLATED, 31)
        for _ in range(1024):
            yield made.compress(bytes(1 << 20))
        yield made.flush()


def test_a_reply_of_a_registry_is_decompressed_up_to_a_limit() -> None:
    request = httpx.Request("GET", "https://registry.example/api")
    answer = httpx.Response(200, headers={"content-encoding": "gzip"}, stream=Bomb(), request=request)
    tracemalloc.start()
    with pytest.raises(ConfigurationError, match=r"registry\.example sent more than 67,108,864 bytes"):
        rest._limited(answer)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200 << 20


REPORTS = (
    "  rank      : 1 (local_rank: 1)\n  exitcode  : 1 (pid: 9)",
    "  Process name: [[1,1],1]\n  Exit code:    1",
    "mpirun noticed that process rank 1 with PID 9 on node n exited on signal 9 (Killed).",
    "ERROR --local_rank=1 exits with return code = 1",
    "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1, OpType=ALLREDUCE, Timeout(ms)=1)",
    "terminating the process due to a collective timeout from rank 1",
    "# of tasks that reached the barrier: 1/2",
    "1/2 clients joined",
)


@pytest.mark.parametrize("report", REPORTS)
@pytest.mark.parametrize("digits", [18, 400, 4000])
def test_numbers_of_any_length_in_a_log_do_not_end_the_diagnosis(report: str, digits: int) -> None:
    for number in re.finditer(r"\d+", report):
        changed = report[: number.start()] + "9" * digits + report[number.end() :]
        found = output.read(changed.splitlines())
        assert found.worker is None or (found.worker.code or 0) < 10**10
