"""What instances and fleets of them cost."""
