"""State, one owner per table: blocks, bookings, predictions, sessions, texts."""
