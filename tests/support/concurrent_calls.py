"""The same work in several threads at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor


def side_by_side(work, arguments):
    """Call `work` with each argument in a thread of its own, all at the same moment; raise the first error."""
    arguments = list(arguments)
    begin = threading.Barrier(len(arguments))

    def run(argument):
        begin.wait()
        work(argument)

    with ThreadPoolExecutor(len(arguments)) as threads:
        list(threads.map(run, arguments))
