"""Files that people write: read with the line of every key, held against a model, and their faults told in our own words."""
