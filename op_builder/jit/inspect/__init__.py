"""Commands that show, explain, compile and remove libraries."""
