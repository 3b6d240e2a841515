"""Finding a library: its key, the cache folders and their entries."""
