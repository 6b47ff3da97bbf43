"""The tables of rules. A rule is one row: id, what it matches, what that means, and where it is written.

Each row has a verbatim example in tests/unit/rules, and is there because without it that example is judged otherwise.
"""
