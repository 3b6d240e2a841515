"""Transformer Engine's modules and names over apex_te; the modules named ``transformer_engine``."""
