"""A simulated vLLM engine: a pure model of its cache and scheduler, and the server around it.

`engine`, `cache`, `eviction`, `host`, `timing`, `answers` and `hashing` are pure and fast: the
simulator drives them in virtual time. `server` gives them vLLM's HTTP surface and `publisher` its
ZMQ event wire; `server.running_mocker` runs one inside a test.
"""
