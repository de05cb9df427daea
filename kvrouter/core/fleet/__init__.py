"""The pools of a replica, their routers, and the feeds that keep them current."""
