"""Reports: one HTML page and one PNG image per run, generated from the files in the run folder.

Reports are made from files alone: they need neither torch nor a process group, and work for running, finished and
killed runs.  `history` reads a run folder and downsamples its data for the page's script (`charts.js`), `page` writes
the HTML, `charts` draws the PNG, `live` keeps pages up to date, `widths` makes the page of `trainer.widths`, and
`__main__` is the command line.
"""
