"""Serve a pipeline over HTTP with OpenAI's image API: `tritium serve`.

The app (`app.py`) imports no torch. It submits jobs to an `Engine` (`engine.py`); the usual one (`dispatch.py`) keeps the
queue and gives batches to a `Runner`, which reaches a `Worker` in a thread, a process, a group of ranks or Ray.
"""
