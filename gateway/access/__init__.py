"""Who may ask what: keys, what they allow, and how much of it."""
