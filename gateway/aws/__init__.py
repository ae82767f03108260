"""AWS, asked for what a deployment planned, and for what stands there of it."""
