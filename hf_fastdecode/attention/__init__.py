"""The algebra of shared-context attention: partials, forests, and the operators that compute them."""
