"""apex's contributed packages."""
