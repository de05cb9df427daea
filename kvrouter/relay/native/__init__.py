"""Streams in C: compiled on Linux if a C compiler is at hand, and optional.

    streams.pyx  passes on what a worker sends to a client while it is nothing but whole, good events

The Python code (exchange.py, upstream.py) is the specification: the tests of the relay run on both.
"""
