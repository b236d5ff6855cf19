"""Web interface: the list of runs, a run's charts, workers, logs and files, a form for new runs, and the aligner.

Pages are rendered on the server and updated by fragments (htmx); charts are drawn in the browser (uPlot). Everything is
served from `static/`, so the pages work offline. They read the same views as the API.
"""
