"""From the log of a run to its result and verdict: statistics, without any I/O."""
