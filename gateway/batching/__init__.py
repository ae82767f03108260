"""Queues to batches: pure functions of (state, event, now). Nothing here waits or does I/O."""
