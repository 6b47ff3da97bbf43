"""The local backend: TrainJob-shaped objects on disk, ranks as processes of this machine.

Modules, from below: `store` (the objects on disk), `runtimes` (the environment of each runtime's ranks), `ranks` (the
processes), `conditions` (of a job; ends one without a supervisor), `gpus` (which job has which GPU, and which waits),
`supervisor` (one detached process per job). These use only the standard library, because a supervisor has to start in
milliseconds. Above them: `supervision` (starts supervisors, and ends jobs without one), `logs` (reads the logs of
ranks), `watching` (looks at all jobs that this process waits for), `backend` (the `Backend` that
`trainjob._jobs.launching` uses).
"""
