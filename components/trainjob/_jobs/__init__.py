"""What happens to jobs: launch, wait, cancel, their results and reports, and the reaper. Works with any `Backend`.

May import `data`, and the layers below.
"""
