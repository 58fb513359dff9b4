"""Reports: an HTML page and a PNG image that show one run or compare several.

Reports are made only from the files in run folders, whether the runs are in progress, finished or killed.  Making them
needs neither torch nor a process group.  `history` reads a run folder and downsamples its data for the page's script
(`charts.js`), `page` generates the HTML, `charts` draws the PNG, `live` keeps pages up to date, and `__main__` is the
command line.  `widths` generates a page for another command, `trainer.widths`.
"""
