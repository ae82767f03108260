"""Machines that can be rented: what they are, and what they cost, as facts with a source and a date."""
