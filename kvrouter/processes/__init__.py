"""Child processes of a command: supervision, their output, an orderly end."""
