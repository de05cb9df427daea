"""Looks at a running fleet from outside, and shows it: the document of a fleet, and the commands over it."""
