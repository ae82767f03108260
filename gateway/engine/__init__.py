"""One inference from the inside: models and their states, lanes, workers, and what is counted of them."""
