"""Evaluation of a candidate beside the current champion, and the gate that decides whether it replaces it. Pure.

May import `_spec`, and the layers below.

::

    scores      what an evaluation writes about one model
    comparison  two of them -> the evaluation report: differences, intervals, slices
    gate        rules as data; evaluation report -> decision
"""

from trainjob.evaluation.comparison import EvaluationReport, compare
from trainjob.evaluation.gate import Decision, Gate
from trainjob.evaluation.scores import Scores

__all__ = ["Decision", "EvaluationReport", "Gate", "Scores", "compare"]
