"""Shared-context attention: partials, forests, and the operators that compute them."""
