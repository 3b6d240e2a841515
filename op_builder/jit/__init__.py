"""Support code of the builders: cache, locks, toolchains, archs and the build itself."""
