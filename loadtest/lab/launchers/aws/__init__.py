"""Candidates on AWS: the door to its API, what an endpoint of a run is called, how it is started and removed."""
