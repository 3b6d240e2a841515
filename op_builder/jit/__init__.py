"""Look-up and compilation of libraries, the shared objects of one op for one device each."""
