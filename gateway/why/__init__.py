"""Why requests were late, and what else would have served them: from a recording of what was decided. Pure."""
