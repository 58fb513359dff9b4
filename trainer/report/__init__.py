"""The report of a run: one page and one picture, from what the run has left in its folder.

Reads files and nothing else: no torch, no process group, a run in progress or a dead one alike.  `story` reads,
`charts` draws (the one door of matplotlib), `page` writes HTML, `__main__` is the command line.
"""
