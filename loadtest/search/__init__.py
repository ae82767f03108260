"""Which measurement next, and what is known by then: pure functions of the events so far."""
