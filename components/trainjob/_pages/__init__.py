"""The pages of jobs and studies: their documents, `trainjob ui` and what is embedded in HTML.

May import `tuning`, and the layers below.
"""
