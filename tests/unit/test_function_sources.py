"""Which functions can be sent to the nodes: those whose source runs where nothing else of their module exists."""

from __future__ import annotations

import importlib.util
import json
import linecache
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trainjob import TrainJobSpec
from trainjob._spec import Function
from trainjob._spec.literals import check_literals
from trainjob.errors import InvalidSpec

BINDINGS = {  # whether these bind `thing` in a function, and for whom, is Python's business
    "none": "",
    "assignment": "thing = 1",
    "unpacking": "[*thing] = [1]",
    "import": "import json as thing",
    "from": "from json import loads as thing",
    "for": "for thing in (1,): pass",
    "with": "import contextlib\nwith contextlib.nullcontext(1) as thing: pass",
    "match": "match [1]:\n    case [thing]: pass",
    "walrus": "(thing := 1)",
    "walrus in a comprehension": "[thing := 1 for _ in (1,)]",
    "def": "def thing(): pass",
    "class": "class thing: pass",
    "global": "global thing\nthing = 1",
    "global, deeper": "def bind():\n    global thing\n    thing = 1\nbind()",
    "global import": "global thing\nimport json as thing",
    "comprehension": "[thing for thing in (1,)]",
    "class body": "class C:\n    thing = 1",
    "parameter of another": "def other(thing): pass",
    "except": "try: 1 / 0\nexcept ZeroDivisionError as thing: pass\nthing = 1",
}
READS = {
    "expression": "str(thing)",
    "class body": "class A:\n    size = thing",
    "class body, same name": "class A:\n    thing = thing",
    "class body, after": "class A:\n    other = 1\n    thing = other\n    size = thing",
    "base": "class A(*[object for _ in [thing]]): pass",
    "decorator in a class": "class A:\n    @(lambda function: thing and function)\n    def run(self): pass",
    "default": "def inner(x=thing): pass",
    "keyword default": "def inner(*, x=thing): pass",
    "annotation": "def inner(x: thing): pass\ninner.__annotations__",  # lazy since 3.14
    "annotation in a class": "class A:\n    size: thing = 1\nA.__annotations__",
    "comprehension": "[thing for _ in (1,)]",
    "generator": "list(_ for _ in (1,) if thing)",
    "lambda": "(lambda: thing)()",
    "f-string": "f'{thing!r:>{9}}'",
    "handler": "try: 1 / 0\nexcept ZeroDivisionError: thing",
    "exception": "try: 1 / 0\nexcept (ZeroDivisionError, *[ValueError for _ in [thing]]): pass",
    "guard": "match 1:\n    case 1 if thing: pass",
    "deeper": "def inner():\n    class A:\n        def run(self): return [thing]\n    A().run()\ninner()",
    "assert": "assert thing is not Ellipsis",
}


def loaded(path: Path, text: str) -> ModuleType:
    """A module of the author."""
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]  # the file exists
    spec.loader.exec_module(module)  # type: ignore[union-attr]  # likewise
    return module


def fails(source: str) -> bool:
    """Whether ``train()`` reads an unknown name where only `source` exists."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    try:
        exec(compile(source, "sent", "exec", dont_inherit=True), namespace)
        namespace["train"]()
    except UnboundLocalError:
        return False  # it fails for the author, too
    except NameError:
        return True
    return False


@pytest.mark.parametrize("binding", BINDINGS)
def test_a_function_is_refused_if_it_reads_a_name_that_only_its_module_has(binding: str, tmp_path: Path) -> None:
    wrong = []
    for read, statement in READS.items():
        body = textwrap.indent(f"{BINDINGS[binding]}\n{statement}\n", "    ")
        text = f"thing = 1\ndef train():\n{body}    return 7\n"
        try:
            sent = Function.of(loaded(tmp_path / "author.py", text).train).source
        except ValueError as refusal:
            if not fails(text.partition("\n")[2]) or "train() uses thing (line " not in str(refusal):
                wrong.append((read, str(refusal)))
        else:
            wrong += [(read, "accepted")] if fails(sent) else []
        linecache.clearcache()
    assert wrong == []


REFUSED = {
    "closure over a loop's variable": (
        "def make():\n    for i in (1, 2):\n        def train(): print(i)\n    return train\ntrain = make()",
        "uses i (line 3) from outside itself",
    ),
    "nonlocal": (
        "def make():\n    n = 1\n    def train():\n        nonlocal n\n        n = 2\n    return train\ntrain = make()",
        "train() (line 4) cannot run by itself: no binding for nonlocal 'n' found",
    ),
    "closure named like a builtin": (
        "def make(id):\n    def train(): print(id)\n    return train\ntrain = make(3)",
        "uses id (line 2) from outside itself",
    ),
    "shadowed builtin": ("from math import pow\ndef train(): return pow(2, 3)", "uses pow (line 2)"),
    "two names and lines": (
        "import math\nLIMIT = 1\ndef train(x=LIMIT):\n\n    return math.pi",
        "uses LIMIT (line 3), math (line 5) from outside itself, which does not exist on the nodes",
    ),
    "global that is read first": ("n = 0\ndef train():\n    global n\n    n += 1", "uses n (line 4)"),
    "deleted global": ("n = 0\ndef train():\n    global n\n    del n", "uses n (line 4)"),
    "its file": ("def train(): return __file__", "uses __file__ (line 1)"),
    "relative import": ("def train():\n    from .models import Net", "uses .models (line 2)"),
    "TYPE_CHECKING of the module": (
        "from typing import TYPE_CHECKING\ndef train():\n    if TYPE_CHECKING:\n        import io",
        "uses TYPE_CHECKING (line 3)",
    ),
    "method": ("class A:\n    def train(self): pass\ntrain = A.train", "train() (line 2) is a method of A"),
    "class method": ("class A:\n    @classmethod\n    def train(cls): pass\ntrain = A.train", "must be a function"),
    "bound method": ("class A:\n    def train(self): pass\ntrain = A().train", "must be a function defined with def"),
    "callable object": ("class A:\n    def __call__(self): pass\ntrain = A()", "must be a function defined with def"),
    "wrapper": (
        "import functools\n\n@functools.cache\ndef train(): pass",
        "train() is wrapped by @functools.cache (line 3), which would not run on the nodes",
    ),
    "innermost wrapper": (
        "import functools\ndef register(f): return f\n@register\n@functools.lru_cache(9)\ndef train(): pass",
        "train() is wrapped by @functools.lru_cache (line 4)",
    ),
    "wrapper without wraps": (
        "def log(f):\n    def run(): return f()\n    return run\n@log\ndef train(): pass",
        "run() uses f (line 2) from outside itself",
    ),
    "generator": ("def train(): yield 1", "must be a function defined with def, without async and yield"),
    "async": ("async def train(): pass", "must be a function defined with def, without async and yield"),
    "async generator": ("async def train(): yield 1", "must be a function defined with def, without async and yield"),
    "renamed lambda": ("train = lambda: 1\ntrain.__name__ = 'train'", "must be a function defined with def"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_refusal_has_name_and_line(case: str, tmp_path: Path) -> None:
    text, message = REFUSED[case]
    module = loaded(tmp_path / "author.py", text)
    with pytest.raises(ValueError, match=re.escape(message)):
        Function.of(module.train)


ACCEPTED = {
    "decorator that returns the function": "def register(f): return f\n@register\ndef train(): return 7",
    "unwrapped": "import functools\n@functools.cache\ndef train(): return 7\ntrain = train.__wrapped__",
    "static method": "class A:\n    @staticmethod\n    def train(): return 7\ntrain = A.train",
    "annotations of the module": (
        "import io\nfrom typing import *\ndef train(a: io.IOBase = None, *b: Any, é: int = 1,\n"
        "          c: 'Unknown' = None, **d: dict[str, Any]) -> Optional[\n          Any]: return 6 + é"
    ),
    "annotations are not evaluated": (
        "from __future__ import annotations\ndef train(x: X = 1):\n    def inner(y: Y): return 7\n    return inner(1)"
    ),
    "annotations are evaluated": (
        "def train():\n    from dataclasses import dataclass, fields\n    from typing import ClassVar, get_type_hints\n"
        "    @dataclass\n    class Options:\n        rates: ClassVar[list] = []\n        size: int = 7\n"
        "    return Options().size if len(fields(Options)) == 1 and get_type_hints(Options)['size'] is int else 0"
    ),
    "other name": "def train(): return 7\ntrain.__name__ = 'other'",
    "recursion": "def train(n=7): return 1 + train(n - 1) if n else 0",
    "nested recursion": (
        "def make():\n    def train(n=7): return 1 + train(n - 1) if n else 0\n    return train\ntrain = make()"
    ),
    "the name of the module": "def train(): return 7 if __name__ == '__main__' else 0",
    "super": (
        "def train():\n    class A:\n        def __init__(self): self.x = 7\n    class B(A):\n"
        "        def __init__(self): super().__init__()\n    return B().x"
    ),
    "module of the same name": "def json():\n    import json\n    return json.loads('7')\ntrain = json",
    "mutable default": "def train(x=[7], y=dict(a=1)): return x[0]",
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_an_accepted_function_runs_in_an_empty_interpreter(case: str, tmp_path: Path) -> None:
    function = Function.of(loaded(tmp_path / "author.py", ACCEPTED[case]).train)
    program = f"{function.source}\n\nprint({function.name}())\n"
    ended = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr) == ("7\n", "")


def test_only_annotations_of_the_module_are_replaced(tmp_path: Path) -> None:
    text = "import io\ndef train(a: io.IOBase, b: list[int], *, c: 'io') -> io.IOBase:\n    x: io = 1  # é\n"
    assert Function.of(loaded(tmp_path / "author.py", text).train).source == (
        "def train(a: object, b: list[int], *, c: 'io') -> object:\n    x: io = 1  # é\n"
    )


def test_a_notebook_has_more_names_than_a_node() -> None:
    """IPython keeps the cells as files, adds builtins, and replaces `open`."""
    cell = "def magic():\n    get_ipython().run_line_magic('pip', 'list')\n\ndef plain():\n    return open\n"
    linecache.cache["<ipython-input-1>"] = (len(cell), None, cell.splitlines(keepends=True), "<ipython-input-1>")
    namespace: dict[str, Any] = {"__name__": "__main__", "open": print, "get_ipython": print}
    exec(compile(cell, "<ipython-input-1>", "exec", dont_inherit=True), namespace)
    with pytest.raises(ValueError, match=r"magic\(\) uses get_ipython \(line 2\)"):
        Function.of(namespace["magic"])
    assert Function.of(namespace["plain"]).source == "def plain():\n    return open\n"


def test_a_name_that_a_tool_adds_to_the_builtins_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.display", pytest.fail, raising=False)
    module = loaded(tmp_path / "author.py", "def train(): display(1)\n")
    with pytest.raises(ValueError, match=r"uses display \(line 1\)"):
        Function.of(module.train)


@pytest.mark.parametrize("changed", ["def other(): pass\n", "def train(x): pass\n", "X = 1\n", "def train(:\n"])
def test_a_source_that_changed_after_the_import_is_refused(changed: str, tmp_path: Path) -> None:
    module = loaded(tmp_path / "author.py", "def train(): pass\n")
    (tmp_path / "author.py").write_text(changed + "#" * 40)
    with pytest.raises(ValueError, match=r"source of train\(\) (changed after it was imported|cannot be read)"):
        Function.of(module.train)


SIGNATURES = {  # signature -> arguments -> paths of the problems
    "": {"": "", "a": "func_args.a"},
    "a": {"": "func_args", "a": "", "a b c": "func_args.b func_args.c"},
    "a, b=1": {"a": "", "a b": "", "b": "func_args"},
    "a, *, b, c=1": {"a": "func_args", "a b": "", "": "func_args", "a b c d": "func_args.d"},
    "a=1, /, b=2": {"": "", "b": "", "a": "func_args.a"},
    "a, /": {"": "func", "a": "func func_args.a"},
    "*args": {"": "", "args": "func_args.args"},
    "a, **options": {"a b": "", "b": "func_args", "a options": ""},
    "a=1, /, **options": {"a b": ""},
}


@pytest.mark.parametrize(("signature", "given"), [(each, given) for each in SIGNATURES for given in SIGNATURES[each]])
@pytest.mark.parametrize("header", ["", "if True:\n    ", "from __future__ import annotations\nif True:\n    "])
def test_arguments_have_to_match_the_signature(signature: str, given: str, header: str) -> None:
    func = {"name": "train", "source": f"{header}def train({signature}): pass"}
    fields = {"runtime": "r", "func": func, "func_args": dict.fromkeys(given.split(), 1)}
    try:
        TrainJobSpec.parse(fields)
        paths = ""
    except InvalidSpec as refused:
        paths = " ".join(problem.path for problem in refused.problems)
    assert paths == SIGNATURES[signature][given]


def test_the_problem_names_what_is_missing_and_the_nearest_parameter() -> None:
    func = {"name": "train", "source": "def train(epochs, *, rate): pass"}
    with pytest.raises(InvalidSpec) as refused:
        TrainJobSpec.parse({"runtime": "r", "func": func, "func_args": {"epoch": 1, "rate": 2}})
    assert "func_args: lacks epochs, which train() requires" in str(refused.value)
    assert "func_args.epoch: is not a parameter of train() (did you mean epochs?)" in str(refused.value)


@pytest.mark.parametrize("source", ["def train(:", "from model import train", "\0", "train = print", "#"])
def test_arguments_of_a_source_without_a_signature_are_not_checked(source: str) -> None:
    spec = TrainJobSpec.parse({"runtime": "r", "func": {"name": "train", "source": source}, "func_args": {"x": 1}})
    assert json.dumps(spec.func_args) == '{"x": 1}'


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("{{ all }}", ""),
        ({"rate": "{{ rate }}"}, ""),
        ({"{{ name }}": 1}, ""),
        ({"rate": 1, "epochs": ["{{ epochs }}"]}, "func_args.epochs"),
        ({"other": "{{ rate }}"}, "func_args func_args.other"),
        ({}, "func_args"),
        (["rate"], "func_args"),
    ],
)
def test_arguments_that_only_a_run_knows_count_by_their_names(given: object, path: str) -> None:
    func = {"name": "train", "source": "def train(rate): pass"}
    fields = {"runtime": "r", "func": func, "func_args": given, "packages_to_install": ["numpy"]}
    try:
        check_literals(fields, lambda value: isinstance(value, str) and "{{" in value)
        paths = ""
    except InvalidSpec as refused:
        paths = " ".join(problem.path for problem in refused.problems)
    assert paths == path
