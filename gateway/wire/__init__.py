"""Connections without I/O: bytes in; requests, and bytes, out. Sockets, timers and threads are their callers'."""
