"""How many bytes decoding may hold: caches and contexts ask here before they are made.

A batch is promised all that its requests may come to hold before they start, so that none that has started runs out.
Who asks for more than is free waits, in the order of asking, until what runs has ended. What does not end by itself is
not waited for: a prefix or a conversation that is kept, and what the thread that waits has itself begun and not
finished, such as a stream that it is in the middle of. A request that does not fit beside these is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from tformer_runtime.base.errors import MemoryBudgetError


class Budget:
    """Bytes that are held, and at most may be. Safe to share between threads.

    limit: None for no limit. held, peak: bytes of caches and contexts now, and the most that there were.
    changed: notified whenever those who wait may have to no longer, which `changes` counts; and when somebody waits.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.held = 0
        self.peak = 0
        self.changed = threading.Condition()
        self.changes = 0
        self._shares: set[Share] = set()  # those that are promised something
        self._queue: dict[Share, int] = {}  # who waits, in this order, and for how many bytes

    def share(self, kept: bool = False, waits: bool = True) -> Share:
        """A share for one batch, or for one state that is kept. waits: whether `ask` may block its thread."""
        return Share(self, kept, waits)

    def look(self) -> None:
        """Have all who wait see whether they still have to, or may."""
        with self.changed:
            self.changes += 1
            self.changed.notify_all()

    def _count(self, bytes_more: int) -> None:
        self.held += bytes_more
        self.peak = max(self.peak, self.held)

    def _grants(self, share: Share, count: int) -> bool:
        """Whether `count` bytes in all are free for a share whose turn it is."""
        if self.limit is None or (count <= share.promised and not self._queue):
            return True
        # Those who wait may wait for what this thread holds: behind them it would never come to give it back.
        turn = not self._queue or next(iter(self._queue)) is share or self._own(share) > 0
        return turn and count + self._promised(lambda other: other is not share) <= self.limit

    def _hopeless(self, share: Share, count: int) -> bool:
        """Whether `count` bytes stay out of reach of a share even if all ends that can end by itself.

        What a waiting thread holds ends after it has been served. So it is asked whether those threads, and this one,
        can be served one after another.
        """
        assert self.limit is not None
        free = self.limit - self._promised(lambda other: other.kept and other is not share)
        if not self._own(share):
            return count > free
        holders = {share.thread: (count, self._own(share))}  # thread → what it waits for, and what it holds
        for other, wanted in self._queue.items():
            if other is not share and (own := self._own(other)):
                holders[other.thread] = (max(wanted, holders.get(other.thread, (0,))[0]), own)
        free -= sum(own for _, own in holders.values())
        while served := [thread for thread, (wanted, _) in holders.items() if wanted <= free]:
            free += sum(holders.pop(thread)[1] for thread in served)
        return bool(holders)

    def _own(self, share: Share) -> int:
        """Bytes that the thread waiting for a share must itself give back: it is in the middle of what holds them."""
        if share.thread is None:
            return 0
        crew = share.crew or {share}
        return self._promised(lambda other: other not in crew and not other.kept and other.thread == share.thread)

    def _promised(self, which: Callable[[Share], bool]) -> int:
        shares = [*self._shares]  # a copy, as one may be freed meanwhile
        return sum(share.promised for share in shares if which(share))


class Share:
    """What one batch is promised of a budget and holds of it; or one state that is kept, which takes as it grows.

    promised: bytes that it may hold. held: that it does.
    thread: which one waits while the share's requests run; None: none. crew: shares that one thread waits for at once,
    each with a thread of its own in which it asks.
    """

    def __init__(self, budget: Budget, kept: bool, waits: bool) -> None:
        self.budget, self.kept, self.waits = budget, kept, waits
        self.promised = 0
        self.held = 0
        self.thread: int | None = None
        self.crew: Collection[Share] = ()

    @property
    def limit(self) -> int | None:
        return self.budget.limit

    def ask(self, count: int, idle: bool = True) -> bool:
        """Be promised `count` bytes, in the place of what was promised before.

        idle: nothing of this share runs that would end and give bytes back. Then it waits for its turn; a share that
        does not wait keeps a place among those who do, and is to ask again when the budget has changed.
        False: not now. MemoryBudgetError: not ever, or not before what is kept is released.
        """
        budget = self.budget
        with budget.changed:
            if self.waits:
                self.thread = threading.get_ident()
            while not budget._grants(self, count):
                if not idle:
                    return False
                if budget._hopeless(self, count):
                    self.leave()
                    raise self._refusal(count)
                if self not in budget._queue:
                    budget.changed.notify_all()
                budget._queue[self] = count
                if not self.waits:
                    return False
                try:
                    budget.changed.wait()
                except BaseException:
                    self.leave()
                    raise
            self.leave()
            self._promise(count)
            return True

    def leave(self) -> None:
        """Wait no longer."""
        if self in self.budget._queue:
            with self.budget.changed:
                self.budget._queue.pop(self, None)
                self.budget.look()

    def take(self, count: int) -> None:
        """Hold `count` bytes more. What is kept waits for them as `ask` does.

        MemoryBudgetError if they cannot be had, and then nothing is taken.
        """
        with self.budget.changed:
            total = self.held + count
            if total > self.promised and not self.ask(total, idle=self.kept):
                raise self._refusal(total)
            self._hold(total)

    def give(self, count: int) -> None:
        """Hold `count` bytes less. What a batch gives back it may take again, until it ends."""
        if count:
            with self.budget.changed:
                self._hold(self.held - count)
                if self.kept:
                    self._promise(self.held)

    def end(self) -> None:
        """No more is needed than is held, which is nothing for a batch that is over."""
        if self.promised > self.held:
            with self.budget.changed:
                self._promise(self.held)

    def _hold(self, total: int) -> None:
        self.budget._count(total - self.held)
        self.held = total

    def _promise(self, count: int) -> None:
        less, self.promised = count < self.promised, count
        (self.budget._shares.add if count else self.budget._shares.discard)(self)
        if less:
            self.budget.look()

    def _refusal(self, count: int) -> MemoryBudgetError:
        if self.limit is not None and count > self.limit:
            return never_fits(count, self.limit)
        others = self.budget._promised(lambda other: other is not self)
        return MemoryBudgetError(
            f"{count:,} bytes may be needed and {others:,} of max_memory={self.limit:,} are held by what does not end "
            "before (prefixes, conversations, streams that are not read to their end): release some, allow more, or "
            "ask for fewer tokens or beams"
        )


def never_fits(need: int, limit: int) -> MemoryBudgetError:
    """What is said of a request that would not fit alone."""
    return MemoryBudgetError(
        f"the request may need {need:,} bytes of cache and max_memory allows {limit:,}: allow more, or ask for fewer "
        "tokens or beams"
    )
