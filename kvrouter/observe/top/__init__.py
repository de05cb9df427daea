"""`kvrouter top`: the fleet in a terminal, from GET /fleet of one or more replicas."""
