"""What the generators are made of: names, templates, and the record of what was written."""
