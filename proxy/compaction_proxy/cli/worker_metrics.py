"""The folder in which workers keep their metrics, so that any of them can answer for all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

from compaction_proxy.support import log_events
from compaction_proxy.telemetry import logs

# Tells workers where it is; the library that counts reads it there, too.
VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


@contextmanager
def open_metrics_folder() -> Iterator[None]:
    """For workers that are started inside: a folder of their own, which nobody else may read.

    Without a place to write, each worker can answer for itself only, and the log says so.
    """
    os.environ.pop(VARIABLE, None)
    try:
        folder = TemporaryDirectory(prefix="compaction-proxy-metrics-", ignore_cleanup_errors=True)
    except OSError as error:
        logs.get_logger(__name__).warning(log_events.METRICS_NOT_SHARED, reason=error.strerror or "")
        yield
        return
    with folder as os.environ[VARIABLE]:
        yield
    del os.environ[VARIABLE]


def share_worker_metrics(worker: int) -> None:
    """Keep the metrics of this process where the other workers find them, if there is such a place."""
    from compaction_proxy.telemetry.metrics import use_shared_folder

    folder = os.environ.get(VARIABLE)
    if folder:
        use_shared_folder(folder, worker)


def drop_worker_metrics(worker: int) -> None:
    """Drop what was true of a worker only while it lived. For its parent."""
    from compaction_proxy.telemetry.metrics import forget_worker

    folder = os.environ.get(VARIABLE)
    if folder:
        forget_worker(folder, worker)
