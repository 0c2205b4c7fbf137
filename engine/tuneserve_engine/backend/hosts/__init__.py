"""One backend over several processes: a leader, which has the lease, and its followers."""
