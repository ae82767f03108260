"""The gateway in somebody else's process: `gateway.load` and `gateway.run`."""
