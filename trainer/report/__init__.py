"""Reports: one HTML page and one PNG per run, generated from the files in the run folder.

Reports only read files.  They need no torch and no process group, and work for running, finished and killed runs.
`history` reads a run folder and downsamples its data for the page's script (`charts.js`), `page` writes the HTML,
`charts` draws the PNG (only this module imports matplotlib), `live` keeps pages up to date, and `__main__` is the
command line.
"""
