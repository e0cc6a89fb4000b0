"""Which change made a release worse: what differs from the live snapshot, and what repairs it."""
