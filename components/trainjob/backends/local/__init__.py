"""The local backend: TrainJob-shaped objects on disk, ranks as processes of this machine.

Layers, from below: `files` (the objects on disk), `runtimes` (what each runtime gives its ranks), `ranks` (the
processes), `supervisor` (one detached process per job), `backend` (what `trainjob.launch` talks to). All but the last
use the standard library only, because a supervisor has to start in milliseconds.
"""
