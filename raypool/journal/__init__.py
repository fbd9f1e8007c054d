"""The journal of a durable run: a folder with each item's outcome, safe from all crashes.

`keys` identifies items and functions, `journal` writes outcomes, `rows` converts them, `schema`
lays them out in SQLite. `opening` opens and repairs a journal, with rows that `salvage` finds in a
damaged file. `files` stores values that do not fit into a row, `plain` writes plain data as JSON,
`lock` keeps other processes out. `reading` makes `Results` from a journal, `replay` runs one item
again. This package does not use Ray, and is imported only for runs with a folder.
"""
