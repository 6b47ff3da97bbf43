"""Hooks of MkDocs (`mkdocs.yml`): pages and parts of pages that are generated from the code.

* A line ``<!-- generated: NAME -->`` is replaced by what the function of that name in `PARTS` returns.
* A link to a file of the repository outside ``docs/`` leads to a page that shows the file.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
from pydantic import BaseModel

import trainjob._diagnosis.hangs
import trainjob._diagnosis.termination_messages
import trainjob._diagnosis.verdict
import trainjob._spec
from trainjob._diagnosis import output
from trainjob._diagnosis.meaning import Meaning
from trainjob._diagnosis.rules.lines import LINES
from trainjob._diagnosis.rules.objects import OBJECTS
from trainjob._diagnosis.rules.raised import RAISED
from trainjob._diagnosis.rules.row import LineRule, ObjectRule, RaisedRule
from trainjob._spec.arguments import ARGUMENTS
from trainjob.cli.program import program
from trainjob.tuning.study import CategoricalParameter, FloatParameter, IntParameter, Pruner, Sampler, Study

if TYPE_CHECKING:  # in .venv-docs only
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
SOURCES = "source"
"""Directory of the site with the pages of files that pages link to."""

_LINK = re.compile(r"(?<!!)(\[(?:[^\[\]]|\[[^\[\]]*\])*\])\(([^()\s]+)\)")
_CODE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".sh": "sh"}
_EXAMPLE = 140  # characters of an example


# ---------------------------------------------------------------- parts of pages


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in cells)} |" for cells in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _commands(command: click.Command, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found is not None and not found.hidden:
                inner = click.Context(found, info_name=name, parent=context)
                yield found, inner
                yield from _commands(found, inner)


def _command(command: click.Command, context: click.Context) -> str:
    usage = " ".join(command.collect_usage_pieces(context))
    text = re.sub(r"^\s*\x08\n", "", inspect.cleandoc(command.help or ""), flags=re.MULTILINE)
    options = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
    records = filter(None, (option.get_help_record(context) for option in options))
    rows = [[f"`{names}`", help_] for names, help_ in records]
    parts = [f"## {context.command_path}", f"```text\n{context.command_path} {usage}\n```", text]
    return "\n\n".join([*parts, *([_table(["option", ""], rows)] if rows else [])])


def cli() -> str:
    """All commands with their options, from the program itself."""
    context = click.Context(program, info_name="trainjob", max_content_width=10_000)
    return "\n\n".join(_command(*each) for each in [(program, context), *_commands(program, context)])


def advice(category: str) -> str:
    """What to do about each known failure of a category: rules with their examples, and meanings without a rule."""
    found: dict[str, list[str]] = {}
    rules: list[ObjectRule | RaisedRule | LineRule] = [*OBJECTS, *RAISED, *LINES]
    for rule in rules:
        if rule.means.category == category:
            found.setdefault(rule.means.advice, [f"`{_example(rule)}`", rule.means.advice, str(rule.means.retry)])
    for module in (trainjob._diagnosis.verdict, trainjob._diagnosis.hangs, trainjob._diagnosis.termination_messages):
        for name, meaning in vars(module).items():
            if isinstance(meaning, Meaning) and meaning.category == category:
                seen = meaning.ended or name.strip("_").replace("_", " ").lower()
                found.setdefault(meaning.advice, [seen, meaning.advice, str(meaning.retry)])
    return _table(["what is seen", "what to do", "retry"], list(found.values())) if found else ""


def _example(rule: ObjectRule | RaisedRule | LineRule) -> str:
    """What a rule's example looks like, as `tests/unit/test_rules.py` judges it."""
    examples = ROOT / "tests" / "unit" / "rules"
    if isinstance(rule, ObjectRule):
        shown = json.loads((examples / f"{rule.id}.json").read_text())
        text = f"{shown['reason']}: {shown['message']}" if shown["message"] else shown["reason"]
    else:
        read = output.read((examples / f"{rule.id}.log").read_text().splitlines())
        text = read.text or read.last or f"exit code or signal {rule.codes if isinstance(rule, LineRule) else ''}"
    plain = " ".join(text.replace("`", "'").split())
    return plain if len(plain) <= _EXAMPLE else plain[: _EXAMPLE - 1] + "…"


def api(module: str, level: str = "2") -> str:
    """The public names of a module, by mkdocstrings, without errors and names that have a separate page."""
    found = importlib.import_module(module)
    names = [name for name in found.__all__ if callable(getattr(found, name)) and not _is_error(getattr(found, name))]
    names = [name for name in names if module != "trainjob" or name not in {*trainjob._spec.__all__, "Settings"}]
    names.sort(key=lambda name: (name == "Backend", name != "TrainJobClient", isinstance(getattr(found, name), type)))
    return "\n\n".join(f"::: {module}.{name}\n    options: {{heading_level: {level}}}" for name in names)


def errors() -> str:
    """The errors that are public, the most general first."""
    found = [(name, getattr(trainjob, name)) for name in trainjob.__all__ if _is_error(getattr(trainjob, name))]
    found.sort(key=lambda each: [base.__name__ for base in reversed(each[1].__mro__)])
    return "\n\n".join(f"::: trainjob.{name}\n    options: {{heading_level: 3}}" for name, _ in found)


def _is_error(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, trainjob.TrainJobError)


def spec() -> str:
    """The models of a spec, `TrainJobSpec` first, each with all of its fields."""
    parts = []
    for name in sorted(trainjob._spec.__all__, key=lambda name: name != "TrainJobSpec"):
        model = getattr(trainjob._spec, name)
        if isinstance(model, type) and issubclass(model, BaseModel):
            members = [*model.model_fields, *(("parse", "check") if name == "TrainJobSpec" else ())]
            options = f"{{show_bases: false, show_if_no_docstring: true, members: [{', '.join(members)}]}}"
            place = "trainjob" if name in trainjob.__all__ else "trainjob._spec"
            parts.append(f"::: {place}.{name}\n    options: {options}")
    return "\n\n".join(parts)


def study() -> str:
    """The models of a study, `Study` first, each with all of its fields."""
    models = [Study, FloatParameter, IntParameter, CategoricalParameter, Sampler, Pruner]
    options = "{{show_bases: false, show_if_no_docstring: true, members: [{}]}}"
    return "\n\n".join(
        f"::: {model.__module__}.{model.__name__}\n    options: {options.format(', '.join(model.model_fields))}"
        for model in models
    )


_UNITS = {"duration": "seconds, or text such as 15m", "words": "list", "mapping": "names with values"}


def arguments() -> str:
    """The table of arguments: what each is called in Airflow, KFP, on the command line and in Python."""
    faces = {"operator": "operator", "component": "component", "command": "command line", "python": "Python"}
    rows = []
    for row in ARGUMENTS.values():
        names = {face: f"`{row.name}`" if face in row.faces else "" for face in faces}
        names["command"] = f"`{row.flag}`" if row.flag else "behind `--`" if "command" in row.faces else ""
        values = ", ".join(f"`{each}`" for each in row.choices) or _UNITS.get(row.kind, row.kind)
        default = "" if row.default is None else f"`{row.default}`"
        rows.append([*names.values(), values, default, row.text])
    return _table([*faces.values(), "values", "default", ""], rows)


def component(name: str) -> str:
    """What a KFP component does, its inputs and outputs, from the README that is generated from it."""
    text = (ROOT / "kfp_components" / "trainjob_kfp" / name / "README.md").read_text()
    parts = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    shown = [f"### {part}\n{parts[part]}" for part in ("Inputs", "Outputs") if part in parts]
    return "\n\n".join([f"## {name}", parts["Overview"].strip(), *shown])


PARTS: dict[str, Callable[..., str]] = {
    "advice": advice,
    "api": api,
    "arguments": arguments,
    "cli": cli,
    "component": component,
    "errors": errors,
    "spec": spec,
    "study": study,
}


# ---------------------------------------------------------------- links to files of the repository


def _target(link: str, place: Path) -> tuple[Path, str] | None:
    """The file of the repository that a link in the file `place` leads to, and the anchor in it."""
    path, _, anchor = link.partition("#")
    if not path or re.match(r"[a-z+]+:", link):
        return None
    return (place.parent / path).resolve(), f"#{anchor}" if anchor else ""


def _address(file: Path) -> str:
    """Where the site has a file of the repository."""
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    name = file.relative_to(ROOT).as_posix()
    return f"{SOURCES}/{name if name.endswith('.md') else f'{name}.md'}"


def linked(text: str, place: Path) -> str:
    """`text` of the file `place` with the links of the site's page."""
    here = Path(_address(place)).parent

    def replaced(found: re.Match[str]) -> str:
        target = _target(found[2], place)
        if target is None or not target[0].is_relative_to(ROOT):
            return found[0]
        return f"{found[1]}({os.path.relpath(_address(target[0]), here)}{target[1]})"

    return "".join(part if number % 2 else _LINK.sub(replaced, part) for number, part in enumerate(_CODE.split(text)))


def _links(file: Path) -> Iterator[Path]:
    """The files outside docs/ that a page links to."""
    for number, part in enumerate(_CODE.split(file.read_text())):
        for found in () if number % 2 else _LINK.finditer(part):
            target = _target(found[2], file)
            if target and target[0].is_file() and target[0].is_relative_to(ROOT) and not target[0].is_relative_to(DOCS):
                yield target[0]


def sources() -> dict[str, str]:
    """Pages of the files outside docs/ that pages link to, and that these pages link to: address -> text."""
    left, found = [*sorted(DOCS.rglob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], dict[str, str]()
    found |= {_address(file): linked(file.read_text(), file) for file in left[-2:]}
    while left:
        for file in _links(left.pop()):
            if _address(file) not in found:
                if file.suffix == ".md":
                    found[_address(file)] = linked(file.read_text(), file)
                    left.append(file)
                else:
                    language = _LANGUAGES.get(file.suffix, "text")
                    name = file.relative_to(ROOT).as_posix()
                    code = f"````{language}\n{file.read_text()}````"
                    found[_address(file)] = f"---\nsearch: {{exclude: true}}\n---\n# {name}\n\n{code}\n"
    return found


# ---------------------------------------------------------------- hooks


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages of linked files."""
    from mkdocs.structure.files import File, InclusionLevel  # noqa: PLC0415 - in .venv-docs only

    for address, text in sources().items():
        page = File.generated(config, address, content=text)
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(text: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links to files and the generated parts."""
    del config, files
    address = page.file.src_uri
    if not address.startswith(f"{SOURCES}/"):
        text = linked(text, DOCS / address)
    return re.sub(
        r"^<!-- generated: ([a-z]+)(?: ([\w., ]+))? -->$",
        lambda found: PARTS[found[1]](*(found[2].split(", ") if found[2] else ())),
        text,
        flags=re.MULTILINE,
    )
