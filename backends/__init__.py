"""The engines: each file holds only what differs from another."""
