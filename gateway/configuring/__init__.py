"""From a model to the configuration that serves it, and what is wrong with a configuration beside its own words."""
