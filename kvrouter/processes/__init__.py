"""Child processes of a command: supervised, heard, ended in good order."""
