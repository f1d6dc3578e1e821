"""Manages the folder in which workers share their metrics, so that any worker can report all of them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory

from compaction_proxy.support import log_events
from compaction_proxy.telemetry import logs

# Environment variable from which the workers and the Prometheus library learn the folder's path.
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


@contextmanager
def open_metrics_folder() -> Iterator[None]:
    """Creates a private folder for the metrics of the workers that are started inside the block.

    If no folder can be created, each worker reports only its own metrics, and the log says so.
    """
    os.environ.pop(FOLDER_VARIABLE, None)
    try:
        folder = TemporaryDirectory(prefix="compaction-proxy-metrics-", ignore_cleanup_errors=True)
    except OSError as error:
        logs.get_logger(__name__).warning(log_events.METRICS_NOT_SHARED, reason=error.strerror or "")
        yield
        return
    with folder as os.environ[FOLDER_VARIABLE]:
        yield
    del os.environ[FOLDER_VARIABLE]


def share_worker_metrics(worker: int) -> None:
    """Stores the metrics of this worker in the shared folder. Does nothing if there is no such folder."""
    from compaction_proxy.telemetry.metrics import use_shared_folder

    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        use_shared_folder(folder, worker)


def drop_worker_metrics(worker: int) -> None:
    """Removes the gauges of an ended worker from the shared folder. Its counters stay in the totals."""
    from compaction_proxy.telemetry.metrics import remove_worker_gauges

    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        remove_worker_gauges(folder, worker)
