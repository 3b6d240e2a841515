"""Parts of the generators of ops, recipes and modules: names, templates and records of files."""
