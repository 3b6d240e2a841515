"""Look-up of libraries: their keys, the cache folders and the entries in them."""
