"""What each kind of layer stores in a shared-context cache: one file per kind."""
