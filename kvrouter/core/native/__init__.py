"""The hot functions in C: compiled if a C compiler is at hand, and optional.

    hashes.pyx   the hash functions of core/wire/hashes.py
    table.pyx    core/tables/table.py: rows.pxi (hash → set), sets.pxi (interned sets of slots),
                 counts.pxi (reference counts), forms.pxi (the types in which hashes arrive)
                 frames.pxi (frames of KV feeds, applied where they lie)
    columns.pyx  what core/routing/candidates.py computes for each target
    messages.pyx the messages that a read of NATS's socket has brought (kvrouter/bus/messages.py)
    xxhash.h     the hash itself, from the sdist of the PyPI package xxhash 4.1.0 (xxHash 0.8.4, BSD-2)

The Python version is the specification; tests/core runs on both. versions.py chooses one for the process.

The C code keeps the GIL: its longest call takes well under a millisecond, and to get the GIL back from
another thread costs up to five.
"""
