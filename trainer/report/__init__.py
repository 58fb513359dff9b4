"""Reports: an HTML page and a PNG image that show one run or compare several.

Reports are made only from the files in run folders, whether the runs are in progress, finished or killed.  Making them
needs neither torch nor a process group.  `history` reads a run folder, `figures` draws the charts, `page` generates the
HTML, and `__main__` is the command line.
"""
