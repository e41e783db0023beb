"""A limit for the bytes of caches and contexts. They acquire their bytes here before they are allocated.

A batch reserves the maximum that its requests may need before they start, so that no running request lacks memory. A
share that needs more than is free waits, in order of arrival, until running requests have ended. It does not wait for
memory that no request releases: a stored prefix or conversation, or an unfinished request of the waiting thread itself,
such as a stream in the middle of its iteration. A request that does not fit next to these is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from tformer_runtime.base.errors import MemoryBudgetError


class MemoryBudget:
    """The bytes of all caches and contexts, and their limit. Safe to share between threads.

    limit: in bytes; None for no limit.
    used_bytes, peak_bytes: bytes of caches and contexts, now and at most so far.
    changed: notified when waiting shares may have a turn, and when a share begins to wait.
    change_count: the number of events after which waiting shares may have a turn.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.used_bytes = 0
        self.peak_bytes = 0
        self.changed = threading.Condition()
        self.change_count = 0
        self._shares: set[MemoryShare] = set()  # shares with a reservation
        self._waiting: dict[MemoryShare, int] = {}  # waiting share → bytes it needs, in order of arrival

    def new_share(self, persistent: bool = False, blocking: bool = True) -> MemoryShare:
        """Return a share for one batch, or for one stored state.

        persistent: whether the share belongs to a stored state, which no request releases.
        blocking: whether `reserve` may block its thread.
        """
        return MemoryShare(self, persistent, blocking)

    @property
    def reserved_bytes(self) -> int:
        """The bytes that all shares have reserved."""
        return self._reserved_bytes(lambda share: True)

    def notify(self) -> None:
        """Let all waiting shares check whether they can reserve their bytes now."""
        with self.changed:
            self.change_count += 1
            self.changed.notify_all()

    def _add_used(self, nbytes: int) -> None:
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def _can_reserve(self, share: MemoryShare, nbytes: int) -> bool:
        """Return whether a share can reserve `nbytes` bytes in total now: they are free, and it is the share's turn."""
        if self.limit is None or (nbytes <= share.reserved_bytes and not self._waiting):
            return True
        # A share whose thread has reserved other bytes takes its turn at once: the others may wait for those bytes.
        has_turn = (
            not self._waiting or next(iter(self._waiting)) is share or self._bytes_held_by_waiting_thread(share) > 0
        )
        return has_turn and nbytes + self._reserved_bytes(lambda other: other is not share) <= self.limit

    def _can_never_reserve(self, share: MemoryShare, nbytes: int) -> bool:
        """Return whether `nbytes` bytes cannot become free for a share, even after all requests that can end.

        The requests of a waiting thread can end only after the thread has got its bytes. So this checks whether these
        threads, and the share's own, can get their bytes one after another.
        """
        assert self.limit is not None
        free = self.limit - self._reserved_bytes(lambda other: other.persistent and other is not share)
        if not self._bytes_held_by_waiting_thread(share):
            return nbytes > free
        # thread → the bytes that it waits for, and the bytes that it has reserved
        threads = {share.thread: (nbytes, self._bytes_held_by_waiting_thread(share))}
        for other, needed in self._waiting.items():
            if other is not share and (reserved := self._bytes_held_by_waiting_thread(other)):
                threads[other.thread] = (max(needed, threads.get(other.thread, (0,))[0]), reserved)
        free -= sum(reserved for _, reserved in threads.values())
        while served := [thread for thread, (needed, _) in threads.items() if needed <= free]:
            free += sum(threads.pop(thread)[1] for thread in served)
        return bool(threads)

    def _bytes_held_by_waiting_thread(self, share: MemoryShare) -> int:
        """Return the bytes reserved by unfinished requests of the thread that waits for a share."""
        if share.thread is None:
            return 0
        group = share.waiting_together or {share}
        return self._reserved_bytes(
            lambda other: other not in group and not other.persistent and other.thread == share.thread
        )

    def _reserved_bytes(self, condition: Callable[[MemoryShare], bool]) -> int:
        """Return the bytes reserved by the shares that fulfil a condition."""
        shares = [*self._shares]  # a copy, because garbage collection may remove a share during the iteration
        return sum(share.reserved_bytes for share in shares if condition(share))


class MemoryShare:
    """The part of a budget that belongs to one batch, or to one stored state, which acquires bytes as it grows.

    reserved_bytes: bytes that the share may use.
    used_bytes: bytes that it uses.
    thread: the thread that waits while the share's requests run; None for no thread.
    waiting_together: shares that one thread waits for at the same time, while each share reserves in another thread.
    """

    def __init__(self, budget: MemoryBudget, persistent: bool, blocking: bool) -> None:
        self.budget, self.persistent, self.blocking = budget, persistent, blocking
        self.reserved_bytes = 0
        self.used_bytes = 0
        self._has_ended = False  # the batch has ended, and a stored error may keep some of its buffers alive
        self.thread: int | None = None
        self.waiting_together: Collection[MemoryShare] = ()

    @property
    def limit(self) -> int | None:
        """The limit of the budget in bytes; None for no limit."""
        return self.budget.limit

    def reserve(self, nbytes: int, idle: bool = True) -> bool:
        """Reserve `nbytes` bytes, in the place of the present reservation. Return False if they are not free now.

        idle: whether no request of this share runs that would release bytes. If so, the share waits for its turn. A
            share that does not block gets a place in the queue and must call again after a change of the budget.
        Raise MemoryBudgetError if the bytes can never become free, or not before stored states are released.
        """
        budget = self.budget
        with budget.changed:
            if self.blocking:
                self.thread = threading.get_ident()
            while not budget._can_reserve(self, nbytes):
                if not idle:
                    return False
                if budget._can_never_reserve(self, nbytes):
                    self.withdraw()
                    raise self._budget_error(nbytes)
                if self not in budget._waiting:
                    budget.changed.notify_all()
                budget._waiting[self] = nbytes
                if not self.blocking:
                    return False
                try:
                    budget.changed.wait()
                except BaseException:
                    self.withdraw()
                    raise
            self.withdraw()
            self._has_ended = False
            self._set_reserved(nbytes)
            return True

    def withdraw(self) -> None:
        """Stop waiting: leave the queue."""
        if self in self.budget._waiting:
            with self.budget.changed:
                self.budget._waiting.pop(self, None)
                self.budget.notify()

    def acquire(self, nbytes: int) -> None:
        """Use `nbytes` more bytes. The share of a stored state waits for them as `reserve` does.

        Raise MemoryBudgetError if the bytes are not available; then the share is unchanged.
        """
        with self.budget.changed:
            total = self.used_bytes + nbytes
            if total > self.reserved_bytes and not self.reserve(total, idle=self.persistent):
                raise self._budget_error(total)
            self._set_used(total)

    def release(self, nbytes: int) -> None:
        """Use `nbytes` fewer bytes. A batch keeps its reservation until it ends."""
        if nbytes:
            with self.budget.changed:
                self._set_used(self.used_bytes - nbytes)
                if self.persistent or self._has_ended:
                    self._set_reserved(self.used_bytes)

    def release_reservation(self) -> None:
        """Reduce the reservation to the used bytes, which are 0 after the end of a batch.

        After an error its traceback may keep buffers alive. Their bytes are released with them.
        """
        self._has_ended = True
        if self.reserved_bytes > self.used_bytes:
            with self.budget.changed:
                self._set_reserved(self.used_bytes)

    def _set_used(self, total: int) -> None:
        self.budget._add_used(total - self.used_bytes)
        self.used_bytes = total

    def _set_reserved(self, nbytes: int) -> None:
        has_shrunk, self.reserved_bytes = nbytes < self.reserved_bytes, nbytes
        (self.budget._shares.add if nbytes else self.budget._shares.discard)(self)
        if has_shrunk:
            self.budget.notify()

    def _budget_error(self, nbytes: int) -> MemoryBudgetError:
        """Return the error for a reservation of `nbytes` bytes that can never succeed."""
        if self.limit is not None and nbytes > self.limit:
            return never_fits_error(nbytes, self.limit)
        others = self.budget._reserved_bytes(lambda other: other is not self)
        return MemoryBudgetError(
            f"the request may need {nbytes:,} bytes, and prefixes, conversations and unfinished streams hold "
            f"{others:,} of max_memory={self.limit:,} until they are released: release some, allow more, or ask for "
            "fewer tokens or beams"
        )


def never_fits_error(need: int, limit: int) -> MemoryBudgetError:
    """Return the error for a request that exceeds the limit on its own. need, limit: in bytes."""
    return MemoryBudgetError(
        f"the request may need {need:,} bytes of cache, but max_memory allows {limit:,}: allow more, or ask for fewer "
        "tokens or beams"
    )
