from array import array

class Scan:
    values: int
    ids: list[tuple[int, int, int]]
    strings: list[tuple[int, int]]
    members: list[tuple[int, int, int]]
    cuts: list[tuple[int, int]]
    def __init__(self, body: bytes, limits: tuple[int, int, int, int]) -> None: ...
    def step(self, most: int) -> bool: ...

def read_ids(body: bytes, start: int, end: int) -> array[int] | None: ...
