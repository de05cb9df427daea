from array import array

def reckon_overlap(
    held: array[int],
    cached: array[int],
    most_blocks: int,
    block_size: int,
    own_tokens: array[int],
    overlap: array[int],
    widest: array[int],
    indexed: array[int],
) -> int: ...
def costs(
    overlap_weight: float,
    block_size: float,
    charged_tokens: array[int],
    own_tokens: array[int],
    active_blocks: array[int],
    own_blocks: array[int],
) -> list[float]: ...
def cost_s(
    now: float,
    fixed_s: float,
    seconds_per_token: float,
    arrivals_per_s: float,
    context_slope: float,
    least_left: float,
    most_gamma: float,
    charged_tokens: array[int],
    unfinished: array[int],
    head_tokens: array[int],
    context_tokens: array[int],
    began_at: array[float],
    own_tokens: array[int],
) -> tuple[list[float], array[float], array[float], float, float]: ...
def next_copies(
    overlap_blocks: array[int],
    wait_s: array[float],
    own_s: array[float],
    most_holders: float,
    equal_within: float,
) -> list[int]: ...
