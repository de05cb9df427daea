"""The core decides: pure functions and tables. Time, chance and settings come in as arguments."""
