"""Look-up of compiled libraries: cache keys, cache folders and the entries in cache folders."""
