"""What operators ask a replica, and change in it."""
