"""Request bodies as clients send them."""
