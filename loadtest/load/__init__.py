"""The load: what is sent and when, the clients that send it, the log of what came back."""
