"""apex's Python packages over apex_te: what ``import apex`` gives once the alias is installed."""
