"""What jit_module.py is made of: names, rendered files, and the record of what was written."""
