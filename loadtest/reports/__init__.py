"""What was found, as people and programs read it."""
