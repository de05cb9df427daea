"""The process: its sockets, its siblings, its tasks, and HTTP."""
