"""Support code of the builders: look-up and compilation of the ops' libraries.

A library is the shared object of one op for one device. Its key is a hash of all that it is made
of; an entry is the folder in a cache that holds one library, made for some GPU archs, and its
manifest.
"""
