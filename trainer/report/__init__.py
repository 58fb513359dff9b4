"""The report of a run: one page and one picture, from the files in the run folder.

Reads files and nothing else: no torch, no process group, a run in progress or a dead one alike.  `story` reads,
`series` thins out what the page's script (`charts.js`) draws, `page` writes HTML, `charts` the picture (the one door of
matplotlib), `live` keeps pages up to date, `__main__` is the command line.
"""
