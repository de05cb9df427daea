"""The record of a request, and who reads it at its end."""
