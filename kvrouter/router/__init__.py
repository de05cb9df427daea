"""Placement as a service: whoever has a data plane of its own asks where a request should go."""
