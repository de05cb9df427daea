"""What travels between processes: identities, hashes, ops, heartbeats."""
