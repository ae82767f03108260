"""The listeners: HTTP and gRPC, on sockets and in memory."""
