"""Loader of peer_exchange."""

from .loader import define_loader

define_loader(globals(), "peer_exchange")
