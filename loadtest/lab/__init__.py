"""Where a search is carried out: candidates started, profiled and measured, and what was found kept."""
