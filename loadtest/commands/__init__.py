"""What `loadtest` does, a module per command."""
