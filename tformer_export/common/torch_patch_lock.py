"""One lock for every region of an export that changes something for the whole process.

Capturing replaces methods of torch's classes for a while, sets the levels of loggers and changes the filters of
warnings. torch itself has process-wide state while it traces, which custom operators change when they run. None of
these belong to a thread. Each such region, and each trace or run of a graph that it would disturb, holds this lock, so
exports of other threads wait. The lock is re-entrant, because regions are nested.

Other threads may run models meanwhile. A few functions of torch that touch its tracing state, `torch.manual_seed` among
them, can fail in another thread while a trace runs.
"""

from __future__ import annotations

import threading

TORCH_PATCH_LOCK = threading.RLock()
