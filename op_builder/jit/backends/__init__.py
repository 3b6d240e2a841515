"""Commands, flags and cache-key texts for each compiler and binding."""
