"""What the page at `/` shows: the fleet as one replica knows it."""
