"""The program of each node of a function trainer: installs packages, writes the script, becomes its launcher.

It is sent as text with the function (``python -c``), so it needs only the standard library, and no shell interprets the
source. The script is a file, because torchrun needs one and spawned workers import it. The variables of Trainer's torch
and MPI plugins select the launcher, since the name of a runtime is arbitrary.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

_SCRIPT = """\
{source}


if __name__ == '__main__':
    import json
    import _trainjob_message
    _trainjob_message.watch()
    _trainjob_message.report_returned({name!r}, {name}(**json.loads({args!r})))
"""


def main(message: str, source: str, options: str) -> None:
    """Become the launcher of the function.

    Args:
        message: Source of the module that reports the return value.
        source: Source of the function.
        options: JSON: its ``name``, its keyword ``args``, and the ``packages`` as arguments of pip.
    """
    given = json.loads(options)
    if "OMPI_MCA_orte_default_hostfile" in os.environ and "OMPI_COMM_WORLD_RANK" not in os.environ:
        _become("mpirun", *sys.orig_argv)
    if given["packages"]:
        _install(given["packages"])
    folder = Path(tempfile.mkdtemp(prefix="trainjob-"))
    (folder / "_trainjob_message.py").write_text(message, encoding="utf-8")
    path = folder / f"function_{given['name']}.py"  # the name alone could hide a module, such as evaluate
    script = _SCRIPT.format(source=source, name=given["name"], args=json.dumps(given["args"]))
    path.write_text(script, encoding="utf-8")
    _become("torchrun" if "PET_NNODES" in os.environ else sys.executable, str(path))


def _become(program: str, *arguments: str) -> None:
    if shutil.which(program) is None:
        sys.stderr.write(f'exec: "{program}": executable file not found in $PATH\n')  # as runc for a command
        sys.exit(127)  # as a shell
    os.execvp(program, [program, *arguments])


def _install(packages: list[str]) -> None:
    """Install packages, once per node, into the environment of this Python, or beside it if that is not writable."""
    folder = _own_folder()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a node of an MPI runtime has several of these processes
        if _writable():
            _pip(packages)
            return
        key = hashlib.sha256(json.dumps([sys.prefix, sys.version, packages]).encode()).hexdigest()
        target = folder / key[:16]
        if not target.exists():
            _install_beside(packages, target)
    for name, directory in (("PYTHONPATH", target), ("PATH", target / "bin")):  # of all processes of the launcher
        os.environ[name] = os.pathsep.join(filter(None, [str(directory), os.environ.get(name)]))


def _writable() -> bool:
    """Whether pip may install into the environment, by its permissions and PEP 668.

    Where it may not, pip fails or installs below the home directory, which a pod of OpenShift does not have.
    """
    environment = sysconfig.get_paths()
    managed = sys.prefix == sys.base_prefix and Path(environment["stdlib"], "EXTERNALLY-MANAGED").exists()
    if managed and not os.environ.get("PIP_BREAK_SYSTEM_PACKAGES"):
        return False
    return os.access(environment["purelib"], os.W_OK)


def _install_beside(packages: list[str], target: Path) -> None:
    """Install into `target` what the environment lacks; ``--target`` alone would install all dependencies again."""
    os.environ.setdefault("PIP_CACHE_DIR", str(target.parent / "cache"))  # else the second run downloads again
    made = Path(tempfile.mkdtemp(dir=target.parent))
    report = made / "report.json"
    _pip(["--dry-run", f"--report={report}", *packages])
    missing = [_requirement(each) for each in json.loads(report.read_text(encoding="utf-8"))["install"]]
    if missing:
        options = [each for each in packages if each.startswith("-")]
        _pip(["--no-user", "--no-deps", f"--target={made}", *options, *missing])
    made.rename(target)


def _requirement(install: dict[str, Any]) -> str:
    """The requirement of one item of pip's report (https://pip.pypa.io/en/stable/reference/installation-report/)."""
    name, download = install["metadata"]["name"], install["download_info"]
    if not install["is_direct"]:
        return f"{name}=={install['metadata']['version']}"
    url = download["url"]
    if "vcs_info" in download:
        url = f"{download['vcs_info']['vcs']}+{url}@{download['vcs_info']['commit_id']}"
    return f"{name} @ {url}" + (f"#subdirectory={download['subdirectory']}" if "subdirectory" in download else "")


def _own_folder() -> Path:
    """A directory that only this user can write, for all its processes; in ``/tmp`` anyone may have made its name."""
    path = Path(tempfile.gettempdir(), f"trainjob-packages-{os.getuid()}")
    with suppress(FileExistsError):
        path.mkdir(0o700)
    found = path.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
        return path
    return Path(tempfile.mkdtemp(prefix="trainjob-packages-"))


def _pip(arguments: list[str]) -> None:
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    if code := subprocess.call(words):
        sys.exit(code)  # pip has written why


if __name__ == "__main__":
    main(*sys.argv[1:])
