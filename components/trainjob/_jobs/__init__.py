"""What happens to jobs: launch, wait, cancel, their results and reports, and the reaper. Works with any `Backend`.

Imports the data steps, registries, goodput, backends and what is below them.
"""
