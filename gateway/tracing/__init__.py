"""Traces of requests, for OpenTelemetry: which requests are traced, what is noted of them, and how that leaves the process.

What a traced request meets is noted on its `RequestTrace`, in times that are taken anyway. Once it is answered, that is handed
to the exporter's own thread, which makes spans of it: nothing of that happens on the event loop, and nothing at all for a
request that is not traced.
"""
