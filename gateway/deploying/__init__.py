"""Where a configuration is deployed: what its processes need there, and the files that ask for it. No cluster is asked."""
