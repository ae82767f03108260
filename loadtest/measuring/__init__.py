"""One run: the one place where a load test waits, and what watches the machine meanwhile."""
