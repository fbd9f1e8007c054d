"""The journal of a durable run: what became of each item, in a folder, safe from whatever happens to the processes.

`keys` says which item is which, `journal` writes and reads what became of them, `schema` is how that lies in SQLite, `opening`
and `salvage` get it out of a damaged file, `files` and `plain` are about what does not fit into a row. `reading` makes `Results`
of it, `replay` runs one item again. Nothing here knows of Ray, and nothing is imported before a run with a folder asks for it.
"""
