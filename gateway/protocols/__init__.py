"""Messages of the protocols to requests and back: pure functions."""
