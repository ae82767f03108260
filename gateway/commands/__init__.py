"""What `gateway` does, a module per command."""
