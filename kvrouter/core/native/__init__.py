"""What is hot, in C: compiled where a C compiler is at hand, and never needed.

    hashes.pyx   twin of the hash functions of core/wire/hashes.py
    table.pyx    twin of core/tables/table.py: rows.pxi (hash → set), sets.pxi (interned sets of slots),
                 counts.pxi, forms.pxi (how hashes come in)
    columns.pyx  twin of what core/routing/candidates.py does for each target
    xxhash.h     the hash itself, from the sdist of the PyPI package xxhash 4.1.0 (xxHash 0.8.4, BSD-2)

The Python version is the specification; tests/core runs on both. core/native/versions.py chooses.

The GIL is kept: the longest call takes well under a millisecond, and to get a GIL back that another
thread has taken costs up to five.
"""
