"""The web page: runs, their curves, workers, logs and files, a form that starts one, and an aligner for two tokenizers.

Pages are rendered here and brought up to date by fragments (htmx); only curves are drawn by the browser (uPlot). All
that a page needs is served from `static/`, so it works without internet. Nothing asks a worker: pages read the same
views as the interface.
"""

from services.control.web.mount import install, opened

__all__ = ["install", "opened"]
