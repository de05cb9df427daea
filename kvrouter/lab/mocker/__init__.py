"""A simulated vLLM engine: a pure model of its cache and scheduler, and a server with its HTTP and ZMQ wire.

`engine`, `cache`, `eviction`, `answers` and `hashing` are pure and fast: the simulator runs them in virtual
time. `server.running_mocker` runs a whole mocker inside a test.
"""
