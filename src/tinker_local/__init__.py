"""A Tinker-compatible service on this machine; it knows nothing of bundles."""
