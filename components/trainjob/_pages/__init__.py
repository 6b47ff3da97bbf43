"""The pages of jobs and studies: their documents, `trainjob ui` and what is embedded in HTML.

Imports the client, studies and what is below them.
"""
